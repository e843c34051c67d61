package outbox

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"
)

// UnknownHash stands for a content that is not known: the row is found by its id alone.
const UnknownHash = 0

// unknownText is the hash of a content that would have UnknownHash: a producer can make such a text.
const unknownText = 1

// Hash identifies the event's content: a chain of PostgreSQL's own
// hashtextextended over the mapped columns that the event is made of, seeded
// with a bit mask of the NULLs. It is computed here over the bytes of the WAL
// and in SQL by [Table.HashSQL] over the table's row, and the two agree.
// It never covers available_at, attempts, last_error, processed_at or an
// unmapped column, so a retry or a new column leaves it alone.
//
// It is [UnknownHash] where a value was omitted.
func (e *Event) Hash() uint64 {
	if len(e.Omitted) > 0 {
		return UnknownHash
	}
	var nulls uint64
	bit := 0
	for f := firstHashed; f <= lastHashed; f++ {
		if !e.Table.Layout.Has(f) {
			continue
		}
		if e.Values[f] == nil {
			nulls |= 1 << bit
		}
		bit++
	}
	h := nulls
	for f := firstHashed; f <= lastHashed; f++ {
		if e.Table.Layout.Has(f) {
			h = HashText(e.Values[f], h)
		}
	}
	if h == UnknownHash {
		return unknownText
	}
	return h
}

// mostHashed is a length that no value of a message exceeds, in bytes: that of the greatest max_payload.
const mostHashed = 64 << 20

// HashSQL is the SQL expression (bigint) that computes [Event.Hash] of a row of
// the table under the given alias. It is NULL where a text is longer than any value that a
// message can have: the server would copy a gigabyte several times, and need seconds. concat() is used
// because it renders a value by its type's output function, as the WAL does; a cast to text does not for
// every type.
func (t *Table) HashSQL(alias string) string {
	var columns []string
	var long []string
	for f := firstHashed; f <= lastHashed; f++ {
		if t.Layout.Has(f) {
			c := alias + "." + t.Column(f)
			columns = append(columns, c)
			if t.Text[f] {
				long = append(long, overlongSQL(c))
			}
		}
	}
	masks := make([]string, len(columns))
	for i, c := range columns {
		// IS NULL is also true of a row of NULLs, and << and | bind equally.
		masks[i] = fmt.Sprintf("((%s IS NOT DISTINCT FROM NULL)::int::bigint << %d)", c, i)
	}
	expr := "(" + strings.Join(masks, " | ") + ")"
	for _, c := range columns {
		expr = fmt.Sprintf(`hashtextextended(concat(%s) COLLATE "C", %s)`, c, expr)
	}
	expr = fmt.Sprintf("coalesce(nullif(%s, %d), %d)", expr, UnknownHash, unknownText)
	if len(long) == 0 {
		return expr
	}
	return fmt.Sprintf("CASE WHEN (%s) IS NOT TRUE THEN %s END", strings.Join(long, " OR "), expr)
}

// overlongSQL is the condition under which a text is longer than any value of a message. Of text alone that
// shows without reading it: what is stored of another type may be compressed, or longer than its text.
func overlongSQL(c string) string { return fmt.Sprintf("octet_length(%s::text) > %d", c, mostHashed) }

// HashText is PostgreSQL's hashtextextended (Bob Jenkins' lookup3 with a 64-bit
// seed) for text of a deterministic collation on a little-endian server.
func HashText(k []byte, seed uint64) uint64 {
	a := 0x9e3779b9 + uint32(len(k)) + 3923095
	b, c := a, a
	if seed != 0 {
		a += uint32(seed >> 32)
		b += uint32(seed)
		a, b, c = mix(a, b, c)
	}
	for len(k) >= 12 {
		a += binary.LittleEndian.Uint32(k)
		b += binary.LittleEndian.Uint32(k[4:])
		c += binary.LittleEndian.Uint32(k[8:])
		a, b, c = mix(a, b, c)
		k = k[12:]
	}
	// The last 11 bytes: the lowest byte of c is reserved for the length.
	for i, x := range k {
		v := uint32(x)
		switch {
		case i >= 8:
			c += v << (8 * (i - 7))
		case i >= 4:
			b += v << (8 * (i - 4))
		default:
			a += v << (8 * i)
		}
	}
	_, b, c = finish(a, b, c)
	return uint64(b)<<32 | uint64(c)
}

func mix(a, b, c uint32) (uint32, uint32, uint32) {
	a -= c
	a ^= bits.RotateLeft32(c, 4)
	c += b
	b -= a
	b ^= bits.RotateLeft32(a, 6)
	a += c
	c -= b
	c ^= bits.RotateLeft32(b, 8)
	b += a
	a -= c
	a ^= bits.RotateLeft32(c, 16)
	c += b
	b -= a
	b ^= bits.RotateLeft32(a, 19)
	a += c
	c -= b
	c ^= bits.RotateLeft32(b, 4)
	b += a
	return a, b, c
}

func finish(a, b, c uint32) (uint32, uint32, uint32) {
	c ^= b
	c -= bits.RotateLeft32(b, 14)
	a ^= c
	a -= bits.RotateLeft32(c, 11)
	b ^= a
	b -= bits.RotateLeft32(a, 25)
	c ^= b
	c -= bits.RotateLeft32(b, 16)
	a ^= c
	a -= bits.RotateLeft32(c, 4)
	b ^= a
	b -= bits.RotateLeft32(a, 14)
	c ^= b
	c -= bits.RotateLeft32(b, 24)
	return a, b, c
}
