package decode

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

var errNoTerminator = errors.New("string without its terminating zero")

// cursor reads the fields of a message. Its first error stays, and every read
// after it gives zero: a reader asks once, at its end.
type cursor struct {
	rest []byte
	err  error
}

func (c *cursor) take(n int) []byte {
	if c.err != nil {
		return nil
	}
	if n < 0 || n > len(c.rest) {
		c.err = shortError(n, len(c.rest))
		return nil
	}
	b := c.rest[:n:n]
	c.rest = c.rest[n:]
	return b
}

func (c *cursor) uint8() byte {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) uint16() uint16 {
	if b := c.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) uint32() uint32 {
	if b := c.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) uint64() uint64 {
	if b := c.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// string reads bytes up to a zero.
func (c *cursor) string() []byte {
	if c.err != nil {
		return nil
	}
	i := bytes.IndexByte(c.rest, 0)
	if i < 0 {
		c.err = errNoTerminator
		return nil
	}
	b := c.take(i)
	c.take(1)
	return b
}

// end is the cursor's verdict on the whole message.
func (c *cursor) end() error {
	if c.err == nil && len(c.rest) != 0 {
		return trailingError(len(c.rest))
	}
	return c.err
}

func shortError(want, have int) error {
	return fmt.Errorf("want %d bytes, have %d", want, have)
}

func trailingError(n int) error {
	return fmt.Errorf("%d bytes after its end", n)
}
