package decode

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

const (
	// omitted is the kind of a value that Abridge has left out, in place of pgoutput's
	// 't'. The value's length follows it, the value does not.
	omitted = 'o'
	// mostOther bounds a message that holds no row, in bytes. A relation of 1,600 columns
	// has about 120 kB.
	mostOther = 1 << 20
)

// Abridge reads one message of n bytes and appends it to dst as [Decoder.Decode] takes
// it, without the values that are too long (see [outbox.Field.Most]) or that no field is
// mapped to. Those are read through and never held. Every message before it has to be
// decoded: they describe the columns.
func (d *Decoder) Abridge(dst []byte, r io.Reader, n, payload int) ([]byte, error) {
	a := abridger{dst: dst, r: r, left: n, payload: payload}
	kind := a.uint8()
	tuples := map[byte]int{'I': 1, 'U': 2, 'D': 1}[kind]
	if tuples == 0 {
		if n > mostOther {
			return nil, fmt.Errorf("message %q has %d bytes, want at most %d", kind, n, mostOther)
		}
		a.take(a.left)
		return a.dst, a.err
	}
	relation := d.relations[a.uint32()]
	if kind != 'I' {
		relation = nil // its values are not used
	}
	for ; tuples > 0 && a.left > 0 && a.err == nil; tuples-- {
		a.tuple(relation)
	}
	if a.err == nil && a.left > 0 {
		a.err = trailingError(a.left)
	}
	return a.dst, a.err
}

// abridger copies a message. Its first error stays.
type abridger struct {
	dst     []byte
	r       io.Reader
	left    int // of the message
	payload int // the longest that is kept
	err     error
}

// take copies n bytes and returns them; nil after an error.
func (a *abridger) take(n int) []byte {
	if a.err == nil && (n < 0 || n > a.left) {
		a.err = shortError(n, a.left)
	}
	if a.err != nil {
		return nil
	}
	a.left -= n
	start := len(a.dst)
	a.dst = slices.Grow(a.dst, n)[:start+n]
	_, a.err = io.ReadFull(a.r, a.dst[start:])
	return a.dst[start:]
}

func (a *abridger) uint8() byte {
	if b := a.take(1); a.err == nil {
		return b[0]
	}
	return 0
}

func (a *abridger) uint16() uint16 {
	if b := a.take(2); a.err == nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (a *abridger) uint32() uint32 {
	if b := a.take(4); a.err == nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (a *abridger) tuple(r *relation) {
	a.uint8() // which one it is
	n := int(a.uint16())
	for i := 0; i < n && a.err == nil; i++ {
		switch kind := a.uint8(); kind {
		case 't':
			a.value(r.most(i, a.payload))
		case omitted:
			a.uint32()
		case 'n', 'u':
		default:
			if a.err == nil {
				a.err = fmt.Errorf("value kind %q", kind)
			}
		}
	}
}

// value copies one that has at most so many bytes, and leaves a longer one out.
func (a *abridger) value(most int) {
	at := len(a.dst) - 1
	n := int(a.uint32())
	if a.err != nil || n <= most {
		a.take(n)
		return
	}
	if n > a.left {
		a.err = shortError(n, a.left)
		return
	}
	a.dst[at] = omitted
	a.left -= n
	_, a.err = io.CopyN(io.Discard, a.r, int64(n))
}

// most is the length up to which a column's values are kept; nil is a relation that is
// not ours.
func (r *relation) most(column, payload int) int {
	if r == nil || column >= len(r.columns) {
		return 0
	}
	f := r.columns[column]
	if f == unmapped {
		return 0
	}
	most := f.Most(payload)
	for _, a := range r.aliases {
		if a.of == f {
			most = max(most, a.field.Most(payload))
		}
	}
	return most
}
