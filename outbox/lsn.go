package outbox

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// LSN is a position in PostgreSQL's write-ahead log: the count of bytes before
// it. Zero means "none".
type LSN uint64

// String renders the LSN as PostgreSQL does, "16/B374D848".
func (l LSN) String() string { return string(l.Append(nil)) }

// Append appends the LSN's text to dst.
func (l LSN) Append(dst []byte) []byte {
	dst = appendUpperHex(dst, uint32(l>>32))
	dst = append(dst, '/')
	return appendUpperHex(dst, uint32(l))
}

func appendUpperHex(dst []byte, v uint32) []byte {
	const digits = "0123456789ABCDEF"
	shift := 28
	for shift > 0 && v>>shift == 0 {
		shift -= 4
	}
	for ; shift >= 0; shift -= 4 {
		dst = append(dst, digits[v>>shift&0xF])
	}
	return dst
}

// ParseLSN reads PostgreSQL's text form of an LSN.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if !ok {
		return 0, fmt.Errorf("parse LSN %q: no slash", s)
	}
	l, err := joinLSN(hi, lo)
	if err != nil {
		return 0, fmt.Errorf("parse LSN %q: %w", s, err)
	}
	return l, nil
}

func joinLSN(hi, lo string) (LSN, error) {
	h, err1 := strconv.ParseUint(hi, 16, 32)
	l, err2 := strconv.ParseUint(lo, 16, 32)
	if err := errors.Join(err1, err2); err != nil {
		return 0, err
	}
	return LSN(h<<32 | l), nil
}
