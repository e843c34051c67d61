package table

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Deliveries are those of the rows of an outbox that outbox_sent knows: under the same ids to the same
// stream, and others.
type Deliveries struct {
	Here, Elsewhere []*Delivery
	Known           []Sent // all of outbox_sent
}

// Delivery is a delivery of all rows of an outbox, or of some.
type Delivery struct {
	Sent
	LeftOut int64 // rows, by [DB.Here]

	rows outbox.Table
	// foreign: nothing shows that the condition, which any role that may write outbox_sent has written, calls
	// no function. No row is taken for its own.
	foreign      bool
	begun, ended []time.Time // its sessions, as marks of the table; no end: it goes on
}

// ReadDeliveries reads from outbox_sent the deliveries of an outbox beside one. A role that may not read that
// knows of none.
func (db *DB) ReadDeliveries(ctx context.Context, t *outbox.Table, one Sent) (*Deliveries, error) {
	all := &Deliveries{}
	known, _, err := db.Sent(ctx, "SELECT")
	all.Known = known
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
	d.rows.Where, d.rows.Filter = of.Condition, ""
	d.foreign = of.Condition != t.Where && !pg.PlainCondition(of.Condition)
	d.rows.Shard, _ = outbox.ParseShard(of.Shard)
	return d, err
}

// ran reports whether a session was under way.
func (d *Delivery) ran(at time.Time) bool {
	n, begins := slices.BinarySearchFunc(d.begun, at, time.Time.Compare)
	if !begins {
		n--
	}
	return n >= 0 && (n == len(d.ended) || !at.After(d.ended[n]))
}

// Here leaves out the marked rows that were delivered elsewhere: a delivery to another stream, or from
// another source, was under way when they were marked, and none to this stream that takes them. A row that a
// condition took and does not take any more, because a column has changed or is gone, is left out, too.
func (db *DB) Here(ctx context.Context, all *Deliveries, rows []MarkedRow) (here []MarkedRow, err error) {
	away := make([]*Delivery, len(rows))
	some := false
	for _, e := range all.Elsewhere {
		for i, row := range rows {
			if away[i] == nil && e.ran(row.Marked) {
				away[i], some = e, true
			}
		}
	}
	if !some {
		return rows, nil
	}
	for _, d := range all.Here {
		if d.foreign {
			continue
		}
		var asked []MarkedRow
		for i, row := range rows {
			if away[i] != nil && d.ran(row.Marked) {
				asked = append(asked, row)
			}
		}
		takes, err := db.takes(ctx, &d.rows, asked)
		if err != nil {
			return nil, err
		}
		for i, row := range rows {
			if takes[row.ID] && d.ran(row.Marked) {
				away[i] = nil
			}
		}
	}
	for i, row := range rows {
		if away[i] == nil {
			here = append(here, row)
		} else {
			away[i].LeftOut++
		}
	}
	return here, nil
}

// takes are the ids of those of the rows that an outbox delivers, by its condition and its shard. A condition
// that cannot be computed any more takes none.
func (db *DB) takes(ctx context.Context, t *outbox.Table, rows []MarkedRow) (map[string]bool, error) {
	takes := map[string]bool{}
	ids := map[string][]string{} // by the tables that have the rows
	archive := "(SELECT * FROM " + db.own.archive + " WHERE outbox = " + pg.QuoteLiteral(t.String()) + ")"
	for _, row := range rows {
		in := t.SQL()
		if !row.Archived.IsZero() {
			in = archive
		}
		ids[in] = append(ids[in], row.ID)
		takes[row.ID] = t.Where == "" && t.Shard.All()
	}
	if t.Where == "" && t.Shard.All() {
		return takes, nil
	}
	for in, some := range ids {
		err := db.Complete(ctx, t)
		if err == nil && (t.Where == "" || t.Filter != "") { // else the role may not read a column
			err = db.fitting(ctx, t, in, some, takes)
		}
		if err != nil && (IsTemporary(err) || !db.Alive() || ctx.Err() != nil) {
			return nil, fmt.Errorf("look up rows of %s: %w", t, err)
		}
	}
	return takes, nil
}

func (db *DB) fitting(
	ctx context.Context, t *outbox.Table, in string, ids []string, fit map[string]bool,
) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, fmt.Sprintf(`SELECT concat(t.%s) FROM %s t
			WHERE t.%[1]s = ANY ($1::text[]::%[3]s[])%[4]s`,
			t.Column(outbox.ID), in, t.IDType, FilterSQL(t, "t")), ids)
		var id string
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error { fit[id] = true; return nil })
		return err
	})
}
