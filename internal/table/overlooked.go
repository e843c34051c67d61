package table

import (
	"context"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// overlookedStep is how many rows one statement of Overlooked looks at.
const overlookedStep = 10_000

// Overlooked lists rows of a table with a journal that are pending and that no search finds: the progress has
// passed their ids, and they have neither an entry nor a deferral. It looks at some thousand rows from an id
// on, and returns the id from which the next call goes on; more is false where there are no further rows.
// Other marks have no such rows.
func (db *DB) Overlooked(
	ctx context.Context, t *outbox.Table, from int64,
) (ids []int64, next int64, more bool, err error) {
	if !Journals(t) {
		return nil, 0, false, nil
	}
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		result, _ := conn.Query(ctx, overlookedSQL(t), from, overlookedStep)
		var n int
		var last, id *int64
		_, err := pgx.ForEachRow(result, []any{&n, &last, &id}, func() error {
			if more = n == overlookedStep && *last < math.MaxInt64; more {
				next = *last + 1
			}
			if id != nil {
				ids = append(ids, *id)
			}
			return nil
		})
		return err
	})
	if err != nil {
		return nil, 0, false, fmt.Errorf("look for rows of %s that no search finds: %w", t, err)
	}
	return ids, next, more, nil
}

// CheckEntries reports an error where the index of the journal's ids lacks entries: rows of theirs count as
// not delivered. A statement of somebody else's may have lost them, see entriesOfSQL. Other marks have no
// such index.
func (db *DB) CheckEntries(ctx context.Context, t *outbox.Table) error {
	if !Journals(t) {
		return nil
	}
	// No other index has the ranges, and a session of ours reads no table where an index will do (pg.DB).
	var there, found int64
	err := db.QueryRow(ctx, []any{&there, &found}, journalSQL(t, `SELECT
		(SELECT count(*) FROM {entries} j WHERE NOT isempty(j.ids)),
		(SELECT count(*) FROM {entries} j WHERE range_merge(j.ids) && int8range(NULL, NULL))`))
	if err != nil {
		return fmt.Errorf("count the entries of %s: %w", t.Journal.Entries, err)
	}
	if found < there {
		return hint.Errorf("as its owner: REINDEX TABLE CONCURRENTLY "+t.Journal.Entries,
			"the index of the ids of %s lacks %d of %d entries: rows of theirs may be delivered again",
			t.Journal.Entries, there-found, there)
	}
	return nil
}

// overlookedSQL looks at $2 rows from id $1 on. A progress of another table, or of other partitions, is void.
func overlookedSQL(t *outbox.Table) string {
	return journalSQL(t, `
WITH span AS MATERIALIZED (
	SELECT count(*)::int AS n, max(x.id)::bigint AS last
	FROM (SELECT e.{id} AS id FROM {table} e WHERE e.{id} >= $1::bigint ORDER BY e.{id} LIMIT $2) x
), ids AS MATERIALIZED (
	SELECT int8multirange(int8range($1::bigint, nullif(s.last, 9223372036854775807) + 1)) AS wanted
	FROM span s WHERE s.n > 0
), open AS MATERIALIZED (
	SELECT i.wanted - k.unsettled - coalesce((SELECT range_agg(r) FROM {entries} j, unnest(j.ids) r
		WHERE j.outbox = {outbox} AND range_merge(j.ids) && i.wanted), '{}') AS ids
	FROM ids i, {known} k WHERE k.outbox = {outbox} AND k.condition = {condition}
		AND {same}
)
SELECT s.n, s.last, t.id FROM span s LEFT JOIN (
	SELECT t.{id}::bigint AS id
	FROM open o, unnest(o.ids) r, LATERAL `+inRangeSQL+` t WHERE {fits}
) t ON true`,
		"{same}", sameTableSQL(t), "{fits}", "true"+FilterSQL(t, "t"))
}

// SearchAgain has the relay search for rows among some ids again. nil is every id: the search of a large
// table may take minutes, while events go on. The relay delivers what it finds pending. It returns false
// where the progress of the outbox is not known.
func (db *DB) SearchAgain(ctx context.Context, t *outbox.Table, ids []int64) (known bool, err error) {
	var again *string // nil: every id
	if ids != nil {
		some := ranges(ids)
		again = &some
	}
	for tries := 0; ; tries++ { // a relay writes the row, too
		err = db.QueryRow(ctx, []any{&known}, journalSQL(t, `WITH changed AS (
				UPDATE {known} k SET unsettled = k.unsettled + coalesce($1::int8multirange, `+everySQL+`),
					updated_at = now()
				WHERE k.outbox = {outbox} AND k.condition = {condition} RETURNING 1
			) SELECT EXISTS (SELECT FROM changed)`), again)
		if !IsLocked(err) || tries == 20 || ctx.Err() != nil {
			break // it has waited for half a second
		}
	}
	if err != nil {
		return false, fmt.Errorf("have %s searched again: %w", t, err)
	}
	return known, nil
}
