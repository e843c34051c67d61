package table

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// Deliveries are those of the rows of an outbox that outbox_sent knows: under the same ids to the same
// stream, and others.
type Deliveries struct{ Here, Elsewhere []*Delivery }

// Delivery is a delivery of all rows of an outbox, or of some.
type Delivery struct {
	Sent
	LeftOut int64 // rows, by [DB.Here]

	rows         outbox.Table
	readable     bool        // else a column of the condition is gone, say
	begun, ended []time.Time // its sessions, as marks of the table; no end: it goes on
}

// ReadDeliveries reads from outbox_sent the deliveries of an outbox beside one. A role that may not read that
// knows of none.
func (db *DB) ReadDeliveries(ctx context.Context, t *outbox.Table, one Sent) (*Deliveries, error) {
	all := &Deliveries{}
	known, _, err := db.Sent(ctx, "SELECT")
	if hint.CodeOf(err) != "" {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	for _, k := range known {
		if !k.Overlaps(&one) {
			continue
		}
		d, err := db.readDelivery(ctx, t, k)
		if err != nil {
			return nil, err
		}
		if k.SameMessages(&one) {
			all.Here = append(all.Here, d)
		} else {
			all.Elsewhere = append(all.Elsewhere, d)
		}
	}
	return all, nil
}

func (db *DB) readDelivery(ctx context.Context, t *outbox.Table, of Sent) (d *Delivery, err error) {
	d = &Delivery{Sent: of, rows: *t}
	for _, session := range of.delivered {
		d.begun = append(d.begun, session.Lower.Time)
		if session.Upper.Valid {
			d.ended = append(d.ended, session.Upper.Time)
		}
	}
	if d.begun, err = db.AsMarks(ctx, t, d.begun); err == nil {
		d.ended, err = db.AsMarks(ctx, t, d.ended)
	}
	if err != nil {
		return nil, err
	}
	d.rows.Where, d.rows.Filter = of.Condition, ""
	d.rows.Shard, _ = outbox.ParseShard(of.Shard)
	err = db.Complete(ctx, &d.rows)
	if err != nil && (IsTemporary(err) || !db.Alive()) {
		return nil, err
	}
	d.readable = err == nil
	return d, nil
}

// ran reports whether a session was under way.
func (d *Delivery) ran(at time.Time) bool {
	n, begins := slices.BinarySearchFunc(d.begun, at, time.Time.Compare)
	if !begins {
		n--
	}
	return n >= 0 && (n == len(d.ended) || !at.After(d.ended[n]))
}

// Here leaves out the marked rows that were delivered elsewhere: they were marked while a delivery to another
// stream, or from another source, was under way that takes them, and none to this stream. Where nothing tells
// whether one takes them, because they are archived or its condition cannot be read any more, one elsewhere
// does, and one here does not.
func (db *DB) Here(ctx context.Context, all *Deliveries, rows []MarkedRow) ([]MarkedRow, error) {
	for _, e := range all.Elsewhere {
		away, err := db.delivered(ctx, e, rows, true)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(away, true) {
			continue
		}
		for _, d := range all.Here {
			here, err := db.delivered(ctx, d, rows, false)
			if err != nil {
				return nil, err
			}
			for i := range rows {
				away[i] = away[i] && !here[i]
			}
		}
		var left []MarkedRow
		for i, row := range rows {
			if away[i] {
				e.LeftOut++
			} else {
				left = append(left, row)
			}
		}
		rows = left
	}
	return rows, nil
}

// delivered says which marked rows a delivery takes that was under way then. unknown is the answer where
// nothing tells.
func (db *DB) delivered(ctx context.Context, d *Delivery, rows []MarkedRow, unknown bool) ([]bool, error) {
	its := make([]bool, len(rows))
	var ids []string
	for i, row := range rows {
		if its[i] = d.ran(row.Marked); its[i] {
			ids = append(ids, row.ID)
		}
	}
	if len(ids) == 0 || d.Condition == "" && d.rows.Shard.All() {
		return its, nil
	}
	var fit map[string]bool
	if d.readable {
		var err error
		if fit, err = db.fitting(ctx, &d.rows, ids); err != nil {
			return nil, err
		}
	}
	for i, row := range rows {
		switch {
		case !its[i]:
		case d.readable && row.Archived.IsZero():
			its[i] = fit[row.ID]
		default:
			its[i] = unknown
		}
	}
	return its, nil
}

// fitting are the rows with these ids that an outbox delivers, by its condition and its shard.
func (db *DB) fitting(ctx context.Context, t *outbox.Table, ids []string) (fit map[string]bool, err error) {
	fit = map[string]bool{}
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, fmt.Sprintf(`SELECT concat(t.%s) FROM %s t
			WHERE t.%[1]s = ANY ($1::text[]::%[3]s[])%[4]s`,
			t.Column(outbox.ID), t.SQL(), t.IDType, FilterSQL(t, "t")), ids)
		var id string
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error { fit[id] = true; return nil })
		return err
	})
	if err != nil {
		err = fmt.Errorf("look up rows of %s: %w", t, err)
	}
	return fit, err
}
