package table

import (
	"strconv"
	"strings"
)

// array is an array parameter in PostgreSQL's text form. It is written as one string: the
// driver would encode each element by itself, which costs more than the statement's other
// work on this side.
type array struct {
	text  strings.Builder
	some  bool // an element that is not NULL
	nulls int  // those before the first such
}

// grow makes room for n elements of some digits.
func (a *array) grow(n int) { a.text.Grow(8 * n) }

func (a *array) next() {
	c := byte(',')
	if a.text.Len() == 0 {
		c = '{'
	}
	a.text.WriteByte(c)
}

// null writes nothing as long as there is nothing else: most of the arrays are NULL.
func (a *array) null() {
	if !a.some {
		a.nulls++
		return
	}
	a.next()
	a.text.WriteString("NULL")
}

// element begins one that is not NULL.
func (a *array) element() {
	if !a.some {
		a.some = true
		for range a.nulls {
			a.null()
		}
	}
	a.next()
}

func (a *array) int(v int64) {
	a.element()
	var digits [20]byte
	a.text.Write(strconv.AppendInt(digits[:0], v, 10))
}

func (a *array) string(s string) {
	a.element()
	if isPlain(s) {
		a.text.WriteString(s)
		return
	}
	a.text.WriteByte('"')
	for {
		i := strings.IndexAny(s, `"\`)
		if i < 0 {
			break
		}
		a.text.WriteString(s[:i])
		a.text.WriteByte('\\')
		a.text.WriteByte(s[i])
		s = s[i+1:]
	}
	a.text.WriteString(s)
	a.text.WriteByte('"')
}

// isPlain reports whether an element needs no quotes, as numbers and UUIDs do not. NULL
// would.
func isPlain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return s != ""
}

// value ends the array. It is the parameter: NULL where every element is.
func (a *array) value() any {
	if !a.some {
		return nil
	}
	a.text.WriteByte('}')
	return a.text.String()
}
