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

// Elsewhere is the last session of a delivery of an outbox to another stream, or from another source. Rows
// that it has marked are not in this one. Of earlier sessions nothing tells which rows of their time they
// have marked: those count as this delivery's.
type Elsewhere struct {
	Sent
	LeftOut int64 // rows, by Here

	rows         outbox.Table // those that it delivers
	begun, ended time.Time    // as marks of the table; zero: it goes on
}

// ReadElsewhere reads from outbox_sent the other deliveries of an outbox than one. A role that may not read
// that knows of none.
func (db *DB) ReadElsewhere(ctx context.Context, t *outbox.Table, one Sent) (all []*Elsewhere, err error) {
	known, _, err := db.Sent(ctx, "SELECT")
	if hint.CodeOf(err) != "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, k := range known {
		if k.ReadAt == nil || k.SameMessages(&one) || !k.Overlaps(&one) {
			continue
		}
		e := &Elsewhere{Sent: k, rows: *t}
		times := []time.Time{*k.ReadAt}
		if k.EndedAt != nil {
			times = append(times, *k.EndedAt)
		}
		if times, err = db.AsMarks(ctx, t, times); err != nil {
			return nil, err
		}
		if e.begun = times[0]; len(times) > 1 {
			e.ended = times[1]
		}
		e.rows.Where, e.rows.Filter = k.Condition, ""
		e.rows.Shard, _ = outbox.ParseShard(k.Shard)
		err := db.Complete(ctx, &e.rows)
		if err != nil && (IsTemporary(err) || !db.Alive()) {
			return nil, err
		}
		if err == nil { // else a column of the condition is gone, say: nothing tells its rows
			all = append(all, e)
		}
	}
	return all, nil
}

// Here leaves out marked rows that other deliveries may have marked: those that they deliver, from the time
// when they went on. Of an archived row only the time is compared.
func (db *DB) Here(ctx context.Context, others []*Elsewhere, rows []MarkedRow) ([]MarkedRow, error) {
	for _, e := range others {
		went := func(row MarkedRow) bool {
			return !row.Marked.Before(e.begun) && (e.ended.IsZero() || !row.Marked.After(e.ended))
		}
		var ids []string
		for _, row := range rows {
			if went(row) {
				ids = append(ids, row.ID)
			}
		}
		if len(ids) == 0 {
			continue
		}
		fit, err := db.fitting(ctx, &e.rows, ids)
		if err != nil {
			return nil, err
		}
		here := slices.DeleteFunc(slices.Clone(rows), func(row MarkedRow) bool {
			return went(row) && (fit[row.ID] || !row.Archived.IsZero())
		})
		e.LeftOut += int64(len(rows) - len(here))
		rows = here
	}
	return rows, nil
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
