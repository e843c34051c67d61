package decode

import (
	"fmt"

	"github.com/walpost/walpost/outbox"
)

// unmapped is the field of a column that the layout does not name.
const unmapped = outbox.NumFields

// minColumn is the size of a column's description: flags, an empty name, type
// and modifier.
const minColumn = 1 + 1 + 4 + 4

// relation is one of our tables as the server describes it at this point of
// the WAL. Columns are matched by name in each description: positions change
// with DDL.
type relation struct {
	table   *outbox.Table
	columns []outbox.Field // by position in the tuple
	// aliases are fields that the layout maps to a column that has a field
	// already.
	aliases []alias
	// missing is raised by each row, not by the description: an unused
	// relation must not stop anything.
	missing *MissingColumnError
}

type alias struct{ of, field outbox.Field }

// relation reads a description. It replaces an earlier one of the same id,
// whose table may have been renamed into or out of our sight.
func (d *Decoder) relation(c *cursor) (Message, error) {
	id, schema, name := c.uint32(), c.string(), c.string()
	c.uint8() // replica identity
	n := int(c.uint16())
	if c.err == nil && len(c.rest) < n*minColumn {
		c.err = fmt.Errorf("%d columns in %d bytes", n, len(c.rest))
	}
	if c.err != nil {
		return Message{}, c.err
	}
	var r *relation
	if t := d.table(id, schema, name); t != nil {
		r = &relation{table: t, columns: make([]outbox.Field, 0, n)}
	}
	described := c.rest
	if err := r.describe(c, n); err != nil {
		return Message{}, err
	}
	d.relations[id] = r
	d.last = nil
	if r == nil {
		return Message{}, nil
	}
	now := fmt.Sprintf("%d %s", id, described)
	before := d.described[r.table]
	d.described[r.table] = now
	return Message{Kind: Described, Altered: before != "" && before != now}, nil
}

// table finds our table. The server leaves out the schema pg_catalog.
func (d *Decoder) table(id uint32, schema, name []byte) *outbox.Table {
	if d.byOID != nil {
		return d.byOID[id]
	}
	for _, t := range d.tables {
		own := t.Schema
		if own == "pg_catalog" {
			own = ""
		}
		if t.Name == string(name) && own == string(schema) {
			return t
		}
	}
	return nil
}

// describe reads the columns; of a nil relation, which is not ours, it keeps
// nothing.
func (r *relation) describe(c *cursor, n int) error {
	for range n {
		c.uint8() // flags: part of the key
		name := c.string()
		c.uint32() // type
		c.uint32() // type modifier
		if r != nil && c.err == nil {
			r.columns = append(r.columns, r.claim(name))
		}
	}
	if err := c.end(); err != nil || r == nil {
		return err
	}
	r.missing = r.findMissing()
	return nil
}

// claim finds the first field that is mapped to the column and notes the
// others as its aliases.
func (r *relation) claim(name []byte) outbox.Field {
	first := unmapped
	for f, column := range r.table.Layout.Columns {
		switch {
		case column == "" || column != string(name):
		case first == unmapped:
			first = outbox.Field(f)
		default:
			r.aliases = append(r.aliases, alias{of: first, field: outbox.Field(f)})
		}
	}
	return first
}

func (r *relation) findMissing() *MissingColumnError {
	var found [outbox.NumFields]bool
	for _, f := range r.columns {
		if f != unmapped {
			found[f] = true
		}
	}
	for _, a := range r.aliases {
		found[a.field] = true
	}
	for f, column := range r.table.Layout.Columns {
		if column != "" && !found[f] && !r.table.Layout.InJournal(outbox.Field(f)) {
			return &MissingColumnError{Table: r.table.String(), Column: column}
		}
	}
	return nil
}
