package decode

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/walpost/walpost/outbox"
)

// keepText is how much memory for rendered binary values outlives its row.
const keepText = 1 << 20

// insert reads without a cursor, which would double its time. It reports
// whether there is a row for us, in d.event.
func (d *Decoder) insert(p []byte) (bool, error) {
	if len(p) < 7 {
		return false, shortError(7, len(p))
	}
	if !d.open {
		return false, errNoTransaction
	}
	id, n := binary.BigEndian.Uint32(p), int(binary.BigEndian.Uint16(p[5:]))
	if p[4] != 'N' {
		return false, fmt.Errorf("tuple kind %q", p[4])
	}
	r, err := d.find(id)
	if err != nil {
		return false, err
	}
	d.event.N++
	if r == nil {
		c := cursor{rest: p[5:]}
		c.tuple()
		return false, c.end()
	}
	if err := d.row(r, n, p[7:]); err != nil {
		return false, fmt.Errorf("table %s: %w", r.table, err)
	}
	return true, nil
}

// find looks a relation up and makes it the event's table; nil is one that is
// not ours.
func (d *Decoder) find(id uint32) (*relation, error) {
	if d.last != nil && d.lastID == id {
		return d.last, nil
	}
	r, ok := d.relations[id]
	if !ok {
		return nil, fmt.Errorf("relation %d was never described", id)
	}
	if r == nil {
		return nil, nil
	}
	if r.missing != nil {
		return nil, r.missing
	}
	d.last, d.lastID = r, id
	// A row writes every mapped field; what another layout maps is left behind
	// unless it is cleared here.
	d.event.Table = r.table
	d.event.Values = [outbox.NumFields][]byte{}
	return r, nil
}

// row reads the tuple of n columns into the event.
func (d *Decoder) row(r *relation, n int, p []byte) error {
	if n != len(r.columns) {
		return fmt.Errorf("%d columns, but %d were described", n, len(r.columns))
	}
	d.text = d.text[:0]
	if cap(d.text) > keepText {
		d.text = nil
	}
	for i, c := range r.columns {
		// Text of a column that is wanted, without a call: half of the time of
		// a row.
		if len(p) >= 5 && p[0] == 't' && c.field != unmapped {
			if n := uint64(binary.BigEndian.Uint32(p[1:])); n <= uint64(len(p)-5) {
				d.event.Values[c.field] = p[5 : 5+n : 5+n]
				p = p[5+n:]
				continue
			}
		}
		var err error
		if p, err = d.value(c, p); err != nil {
			return fmt.Errorf("column %s: %w", r.columnName(i), err)
		}
	}
	if len(p) != 0 {
		return trailingError(len(p))
	}
	for _, a := range r.aliases {
		d.event.Values[a.field] = d.event.Values[a.of]
	}
	return nil
}

// value reads one column and returns what follows it.
func (d *Decoder) value(c column, p []byte) ([]byte, error) {
	if len(p) == 0 {
		return nil, shortError(1, 0)
	}
	kind, p := p[0], p[1:]
	var v []byte
	switch kind {
	case 'n':
	case 't', 'b':
		if len(p) < 4 {
			return nil, shortError(4, len(p))
		}
		n := uint64(binary.BigEndian.Uint32(p))
		p = p[4:]
		if n > uint64(len(p)) {
			return nil, fmt.Errorf("want %d bytes, have %d", n, len(p))
		}
		v, p = p[:n:n], p[n:]
	case 'u':
		return nil, errors.New("unchanged TOAST value in an INSERT")
	default:
		return nil, fmt.Errorf("value kind %q", kind)
	}
	if c.field == unmapped {
		return p, nil
	}
	if kind == 'b' {
		var err error
		if v, err = d.render(c.typ, v); err != nil {
			return nil, err
		}
	}
	d.event.Values[c.field] = v
	return p, nil
}

// columnName names a column for an error message: unmapped names are not kept.
func (r *relation) columnName(i int) string {
	if f := r.columns[i].field; f != unmapped {
		return fmt.Sprintf("%q", r.table.Layout.Columns[f])
	}
	return fmt.Sprintf("%d", i+1)
}
