package catalog

import (
	"bytes"
	"fmt"
)

// The limits of a payload that is checked. Rows are hostile: a megabyte can hold half a million values, or
// numbers of a million digits.
const (
	// MaxDepth is how deep objects and lists may be nested.
	MaxDepth = 100
	// MaxValues is how many values a payload may have.
	MaxValues = 100_000
	// MaxNumber is how many characters a number may have, and how large its exponent may be.
	MaxNumber = 400
)

// size is how large a payload is.
type size struct{ values, depth int }

// checkLimits reads the bytes once, whether they are JSON or not.
func checkLimits(payload []byte) (s size, f *Fault) {
	depth := 0
	s.values = 1
	for i := 0; i < len(payload); i++ {
		switch c := payload[i]; {
		case c == '"':
			i = skipText(payload, i)
		case c == '{' || c == '[':
			depth++
			s.depth = max(s.depth, depth)
			s.values++
		case c == '}' || c == ']':
			depth--
		case c == ',':
			s.values++
		case c == '-' || c >= '0' && c <= '9':
			end := i + numberLength(payload[i:])
			if !isReasonable(payload[i:end]) {
				return s, faultf("a number has more than %d characters, or such an exponent", MaxNumber)
			}
			i = end - 1
		}
		if depth > MaxDepth {
			return s, faultf("it is nested deeper than %d", MaxDepth)
		}
	}
	if s.values > MaxValues {
		return s, faultf("it has more than %d values", MaxValues)
	}
	return s, nil
}

// skipText returns the index of the closing quote of the text that begins at i.
func skipText(b []byte, i int) int {
	for i++; i < len(b) && b[i] != '"'; i++ {
		if b[i] == '\\' {
			i++
		}
	}
	return i
}

func numberLength(b []byte) (n int) {
	for n < len(b) && (b[n] >= '0' && b[n] <= '9' || bytes.IndexByte([]byte("+-.eE"), b[n]) >= 0) {
		n++
	}
	return n
}

// faultf is a fault of the whole payload.
func faultf(format string, args ...any) *Fault { return &Fault{Text: fmt.Sprintf(format, args...)} }

func isReasonable(number []byte) bool {
	if len(number) > MaxNumber {
		return false
	}
	exponent, inside := 0, false
	for _, c := range number {
		switch {
		case c|0x20 == 'e':
			inside = true
		case inside && c >= '0' && c <= '9':
			exponent = min(10*exponent+int(c-'0'), MaxNumber+1)
		}
	}
	return exponent <= MaxNumber
}
