package decode

import "fmt"

// These messages mean nothing to an outbox. They are read all the same: one
// that does not add up shows that the two sides disagree about the protocol.

func (d *Decoder) update(c *cursor) (Message, error) {
	c.uint32() // relation
	kind := c.uint8()
	if kind == 'K' || kind == 'O' {
		c.tuple()
		kind = c.uint8()
	}
	c.expect(kind, "N")
	c.tuple()
	return d.change(c)
}

func (d *Decoder) delete(c *cursor) (Message, error) {
	c.uint32() // relation
	c.expect(c.uint8(), "KO")
	c.tuple()
	return d.change(c)
}

func (d *Decoder) truncate(c *cursor) (Message, error) {
	n := c.uint32()
	c.uint8() // options: CASCADE, RESTART IDENTITY
	if c.err == nil && uint64(len(c.rest)) != 4*uint64(n) {
		return Message{}, fmt.Errorf("%d relations in %d bytes", n, len(c.rest))
	}
	c.take(len(c.rest))
	return d.change(c)
}

// change is the end of every message that belongs into a transaction.
func (d *Decoder) change(c *cursor) (Message, error) {
	if c.err == nil && !d.open {
		return Message{}, errNoTransaction
	}
	return Message{}, c.err
}

func (d *Decoder) origin(c *cursor) (Message, error) {
	c.uint64() // LSN of the commit at the origin
	c.string() // its name
	return Message{}, c.err
}

func (d *Decoder) typ(c *cursor) (Message, error) {
	c.uint32() // OID
	c.string() // schema
	c.string() // name
	return Message{}, c.err
}

// message is what pg_logical_emit_message wrote; one that is not transactional
// comes outside a transaction.
func (d *Decoder) message(c *cursor) (Message, error) {
	c.uint8()  // flags: transactional
	c.uint64() // LSN
	c.string() // prefix
	c.bytes()
	return Message{}, c.err
}

// tuple skips a row.
func (c *cursor) tuple() {
	for n := c.uint16(); n > 0 && c.err == nil; n-- {
		switch kind := c.uint8(); kind {
		case 't':
			c.bytes()
		case omitted:
			c.uint32()
		default:
			c.expect(kind, "nut")
		}
	}
}

// bytes reads over a length and what it announces.
func (c *cursor) bytes() { c.take(int(c.uint32())) }

func (c *cursor) expect(kind byte, of string) {
	for i := range len(of) {
		if kind == of[i] {
			return
		}
	}
	if c.err == nil {
		c.err = fmt.Errorf("kind %q, want one of %q", kind, of)
	}
}
