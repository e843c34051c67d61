package decode

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/walpost/walpost/outbox"
)

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
	if r != nil && r.missing != nil {
		return false, r.missing
	}
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
	if d.event.Omitted != nil {
		d.event.Omitted = nil
	}
	for i, f := range r.columns {
		// Text of a column that is wanted, without a call: half of the time of
		// a row.
		if len(p) >= 5 && p[0] == 't' && f != unmapped {
			if n := uint64(binary.BigEndian.Uint32(p[1:])); n <= uint64(len(p)-5) {
				d.event.Values[f] = p[5 : 5+n : 5+n]
				p = p[5+n:]
				continue
			}
		}
		var err error
		if p, err = d.value(f, p); err != nil {
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
func (d *Decoder) value(f outbox.Field, p []byte) ([]byte, error) {
	if len(p) == 0 {
		return nil, shortError(1, 0)
	}
	kind, p := p[0], p[1:]
	var v []byte
	switch kind {
	case 'n':
	case 't':
		if len(p) < 4 {
			return nil, shortError(4, len(p))
		}
		n := uint64(binary.BigEndian.Uint32(p))
		p = p[4:]
		if n > uint64(len(p)) {
			return nil, fmt.Errorf("want %d bytes, have %d", n, len(p))
		}
		v, p = p[:n:n], p[n:]
	case omitted:
		if len(p) < 4 {
			return nil, shortError(4, len(p))
		}
		if f != unmapped {
			d.event.Omit(f, int(binary.BigEndian.Uint32(p)))
		}
		return p[4:], nil
	case 'u':
		return nil, errors.New("unchanged TOAST value in an INSERT")
	default:
		return nil, fmt.Errorf("value kind %q", kind)
	}
	if f != unmapped {
		d.event.Values[f] = v
	}
	return p, nil
}

// columnName names a column for an error message: unmapped names are not kept.
func (r *relation) columnName(i int) string {
	if f := r.columns[i]; f != unmapped {
		return fmt.Sprintf("%q", r.table.Layout.Columns[f])
	}
	return fmt.Sprintf("%d", i+1)
}
