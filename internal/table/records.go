package table

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// findsAggregates reports whether recorded rows are looked for by their aggregates.
func findsAggregates(t *outbox.Table) bool {
	return t.Layout.Records() && t.Layout.Has(outbox.AggregateID)
}

// HaveRecords tells of each event whether its aggregate has a recorded row pending. The
// events' own rows need not be visible.
func (db *DB) HaveRecords(ctx context.Context, t *outbox.Table, evs []*outbox.Event) ([]bool, error) {
	have := make([]bool, 0, len(evs))
	sql, err := db.haveRecordsSQL(ctx, t)
	if err == nil {
		err = portions[*outbox.Event]{
			size: &db.portion, bytes: (*outbox.Event).Size,
			do: func(evs []*outbox.Event) error {
				some := make([]bool, len(evs))
				err := db.QueryText(ctx, sql, aggregateArgs(t, evs), func(v [][]byte) error {
					ord, err := strconv.Atoi(string(v[0]))
					if err == nil {
						some[ord-1] = true
					}
					return err
				})
				if err == nil {
					have = append(have, some...)
				}
				return err
			},
			alone: func(*outbox.Event, error) error {
				have = append(have, false) // the columns cannot hold such a value
				return nil
			},
		}.run(evs)
	}
	if err != nil {
		return nil, fmt.Errorf("look for recorded rows of aggregates of %s: %w", t, err)
	}
	return have, nil
}

// aggregateArgs are the names of the events' aggregates, and then the columns that the layout has.
func aggregateArgs(t *outbox.Table, evs []*outbox.Event) []any {
	aggregates := &array{}
	columns := []*array{aggregates}
	for _, f := range aggregateFields {
		if t.Layout.Has(f) {
			columns = append(columns, &array{})
		}
	}
	for _, ev := range evs {
		aggregates.string(string(ev.AggregateName()))
		n := 0
		for _, f := range aggregateFields {
			if !t.Layout.Has(f) {
				continue
			}
			if n++; ev.Values[f] == nil {
				columns[n].null()
			} else {
				columns[n].string(string(ev.Values[f]))
			}
		}
	}
	args := make([]any, len(columns))
	for i, c := range columns {
		args[i] = c.value()
	}
	return args
}

// haveRecordsSQL finds the rows by the hash that the index of recorded rows is made of. A column is hashed as
// what it is: its parameter has the column's type and collation, and where the type is a domain, those that
// the domain is made of. Such a parameter calls only the type's own input function, no cast and no check of
// the domain. LATERAL and LIMIT leave the planner no choice but to look up each aggregate.
func (db *DB) haveRecordsSQL(ctx context.Context, t *outbox.Table) (string, error) {
	params, names, values := []string{"$1::text[]"}, []string{"aggregate"}, []string{}
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		for _, f := range aggregateFields {
			if !t.Layout.Has(f) {
				continue
			}
			typ, collate, err := readColumnType(ctx, conn, t, f)
			if err != nil {
				return err
			}
			name := fmt.Sprintf("c%d", len(names))
			params, names = append(params, fmt.Sprintf("$%d::%s[]", len(params)+1, typ)), append(names, name)
			values = append(values, "w."+name+collate)
		}
		return nil
	})
	// A row that is kept counts, too: the planner finds the index by this condition alone, and no other one.
	// A row that is held for nothing is delivered by the next search.
	same := fmt.Sprintf("%s%s AND %s AND %s = w.hash AND %s COLLATE \"C\" = w.aggregate",
		UnmarkedSQL(t, "t"), FilterSQL(t, "t"), recordedIs(t, "t"), MarkOf(t).aggregateHashSQL(t), nameSQL(t))
	return strings.NewReplacer(
		"{table}", sourceOf(t).pending, "{params}", strings.Join(params, ", "),
		"{names}", strings.Join(names, ", "),
		"{hash}", outbox.HashRecordSQL(values...), "{same}", same,
	).Replace(`
WITH want AS MATERIALIZED (
	SELECT w.ord, w.aggregate, {hash} AS hash FROM unnest({params}) WITH ORDINALITY AS w({names}, ord)
)
SELECT w.ord FROM want w, LATERAL (SELECT FROM {table} t WHERE {same} LIMIT 1) t`), err
}

// aggregateHashSQL implements Mark.
func (inRow) aggregateHashSQL(t *outbox.Table) string { return t.AggregateHashSQL("t") }

// readColumnType returns a column's type and its collation. Where the type is a domain, it returns the one
// that the domain is made of.
func readColumnType(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, f outbox.Field,
) (typ, collate string, err error) {
	err = conn.QueryRow(ctx, columnTypeSQL, t.SQL(), t.Layout.Columns[f]).Scan(&typ, &collate)
	if err != nil {
		return "", "", fmt.Errorf("read the type of %s: %w", t.Layout.Columns[f], err)
	}
	return typ, collate, nil
}

// columnTypeSQL is a column's type as an element of an array, and its collation.
const columnTypeSQL = `
WITH RECURSIVE typed AS (
	SELECT t.oid, t.typtype, t.typbasetype, a.attcollation
	FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
	WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped
	UNION ALL
	SELECT t.oid, t.typtype, t.typbasetype, d.attcollation
	FROM typed d JOIN pg_type t ON t.oid = d.typbasetype WHERE d.typtype = 'd'
)
SELECT format_type(oid, -1),
	CASE WHEN attcollation = 0 THEN '' ELSE ' COLLATE ' || attcollation::regcollation::text END
FROM typed WHERE typtype <> 'd'`
