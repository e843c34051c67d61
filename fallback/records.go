package fallback

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/walpost/walpost/outbox"
)

// HaveRecords tells of each event whether its aggregate has a recorded row pending. The
// events' own rows need not be visible.
func (db *DB) HaveRecords(ctx context.Context, t *outbox.Table, evs []*outbox.Event) ([]bool, error) {
	have := make([]bool, len(evs))
	for nulls, at := range byNulls(evs) {
		values := [len(aggregateFields)]*array{newArray(len(at)), newArray(len(at)), newArray(len(at))}
		for _, n := range at {
			for i, f := range aggregateFields {
				if v := evs[n].Values[f]; v != nil {
					values[i].string(string(v))
				} else {
					values[i].null()
				}
			}
		}
		err := db.raw(ctx, haveRecordsSQL(t, nulls), []any{values[0].value(), values[1].value(), values[2].value()}, func(v [][]byte) error {
			ord, err := strconv.Atoi(string(v[0]))
			if err == nil {
				have[at[ord-1]] = true
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("look for recorded rows of aggregates of %s: %w", t, err)
		}
	}
	return have, nil
}

// nulls tells which of aggregateFields are NULL. An index answers to = and to IS NULL, and
// not to both in one condition.
type nulls [len(aggregateFields)]bool

func byNulls(evs []*outbox.Event) map[nulls][]int {
	by := map[nulls][]int{}
	for i, ev := range evs {
		var key nulls
		for n, f := range aggregateFields {
			key[n] = ev.Values[f] == nil
		}
		by[key] = append(by[key], i)
	}
	return by
}

// haveRecordsSQL has the values cast to the columns' types by way of the table's row type. LATERAL and
// LIMIT leave the planner no choice but to look up each aggregate.
func haveRecordsSQL(t *outbox.Table, isNull nulls) string {
	var object []string
	// A row that is kept counts, too: the planner finds the index by this condition alone. A row that is held for
	// nothing is delivered by the next search.
	same := pendingSQL(t, "t") + " AND t." + t.Column(outbox.LastError) + " IS NOT NULL"
	for i, f := range aggregateFields {
		if !t.Layout.Has(f) {
			continue
		}
		column := t.Column(f)
		if isNull[i] {
			same += " AND t." + column + " IS NULL"
			continue
		}
		same += " AND t." + column + " = p." + column
		object = append(object, quoteLiteral(t.Layout.Columns[f])+", w."+[...]string{"tenant", "kind", "aggregate"}[i])
	}
	return strings.NewReplacer("{table}", t.SQL(), "{object}", strings.Join(object, ", "), "{same}", same).Replace(`
SELECT w.ord FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS w(tenant, kind, aggregate, ord),
	LATERAL jsonb_populate_record(NULL::{table}, jsonb_build_object({object})) p,
	LATERAL (SELECT FROM {table} t WHERE {same} LIMIT 1) t`)
}
