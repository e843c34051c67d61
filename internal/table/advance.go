package table

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Advance is how far the progress of a table with a journal is to go next, and what becomes of its holes.
type Advance struct {
	to int64 // was seen
	// holesTo was seen, too. writers are the transactions that may still insert rows with ids up to there.
	holesTo int64
	writers []string
	// Whole is set by a call that has ended a search of the whole table, and found no row pending.
	Whole *Search
	whole *Search // of earlier calls, up to a row that was pending
}

// Search is what a search of a whole table took.
type Search struct {
	Rows int64 // that had no entry
	Took time.Duration
}

// Advance moves the progress of a table with a journal on, where it can: to an id up to which no row is
// pending without a deferral. Rows that are due later get one. Ids up to there that were not seen are
// holes: they belong to transactions that are open, or were rolled back. A hole goes when all transactions
// have ended that may have had it. With other marks Advance does nothing.
//
// An INSERT holds its lock on the table before it draws an id, and so a transaction that holds none when a
// row is seen inserts none with a lesser id: the ids come from a sequence with CACHE 1.
func (db *DB) Advance(ctx context.Context, t *outbox.Table, a *Advance) error {
	if !Journals(t) {
		return nil
	}
	err := db.advance(ctx, t, a)
	if err != nil {
		return fmt.Errorf("advance the journal of %s: %w", t, err)
	}
	return nil
}

func (db *DB) advance(ctx context.Context, t *outbox.Table, a *Advance) error {
	now, err := db.writersOf(ctx, t)
	if err != nil {
		return err
	}
	var ended int64
	if a.writers = stillOpen(a.writers, now); len(a.writers) == 0 {
		ended = a.holesTo
	}
	a.Whole = nil
	for s := (step{ended: ended}); a.to > 0 && s.to < a.to; {
		err = db.QueryRow(ctx, []any{&s.to}, stepSQL(t), s.from, a.to, mostSearched)
		if err != nil {
			return err
		}
		done, err := db.take(ctx, t, s, a)
		if err != nil || !done { // a row up to there is pending
			return err
		}
		from := s.to
		s.from = &from
	}
	if a.to > 0 {
		a.Whole, a.whole = a.whole, nil
	}
	var seen, settled int64
	var hasHoles bool
	// An id that was not drawn from the sequence says nothing of lesser ones.
	err = db.QueryRow(ctx, []any{&seen, &settled, &hasHoles}, journalSQL(t, `SELECT coalesce(
			least(max(e.{id}),
				pg_sequence_last_value(pg_get_serial_sequence({regclass}, {column})::regclass)), 0),
		coalesce((SELECT `+SettledSQL+` FROM `+progressSQL+`), 0),
		EXISTS (SELECT FROM `+progressSQL+` AND `+holesSQL+` > 0)
		FROM {table} e WHERE {bound}`, "{regclass}", outbox.QuoteLiteral(t.SQL()),
		"{column}", outbox.QuoteLiteral(t.Layout.Columns[outbox.ID])))
	if err != nil {
		return err
	}
	seen = max(min(seen, mostSettled), settled)
	if a.to = 0; seen > settled || hasHoles {
		a.to = seen
	}
	if ended == a.holesTo { // no writer of theirs is left
		a.holesTo = seen
		a.writers, err = db.writersOf(ctx, t)
	}
	return err
}

// Progress is how far a journal's progress is.
type Progress struct {
	SettledTo int64 `json:"settled_to"` // 0 where nothing is settled yet
	Behind    int64 `json:"behind"`     // the greatest id is so many further
	Holes     int   `json:"holes"`      // ranges of ids below it that were not seen
}

// Progress reads how far the progress of a table with a journal is.
func (db *DB) Progress(ctx context.Context, t *outbox.Table) (p Progress, err error) {
	err = db.QueryRow(ctx, []any{&p.SettledTo, &p.Behind, &p.Holes}, journalSQL(t, `
		SELECT coalesce(k.settled, 0), greatest(coalesce(e.last, 0) - coalesce(k.settled, 0), 0),
			coalesce(k.holes, 0)
		FROM (SELECT max(e.{id}) AS last FROM {table} e) e
			LEFT JOIN (SELECT `+SettledSQL+` AS settled, `+holesSQL+` AS holes
				FROM `+progressSQL+`) k ON true`))
	if err != nil {
		err = fmt.Errorf("read the progress of %s: %w", t, err)
	}
	return p, err
}

// stillOpen are those of the transactions that have not ended. One that is prepared meanwhile gets another
// name: where one of them is gone, every prepared one may be it.
func stillOpen(before, now []string) (open []string) {
	for _, w := range before {
		if slices.Contains(now, w) {
			open = append(open, w)
		}
	}
	if len(open) == len(before) {
		return open
	}
	for _, w := range now {
		if strings.HasPrefix(w, preparedPrefix) && !slices.Contains(open, w) {
			open = append(open, w)
		}
	}
	return open
}

// preparedPrefix begins what pg_locks calls a prepared transaction.
const preparedPrefix = "-1/"

// writersOf are the transactions that hold a lock to write to the table, as pg_locks names them.
func (db *DB) writersOf(ctx context.Context, t *outbox.Table) (writers []string, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, `SELECT DISTINCT l.virtualtransaction::text FROM pg_locks l
			WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
				AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
				AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
					'AccessExclusiveLock')
				AND l.relation IN (SELECT to_regclass($1) UNION ALL
					SELECT relid FROM pg_partition_tree(to_regclass($1)))`, t.SQL())
		writers, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return writers, err
}

// mostDeferred bounds how many rows one statement defers.
const mostDeferred = 10_000

// mostHoles bounds the holes. Where there are more, neighbours become one: what lies between them has
// entries, which are read again.
var mostHoles = 10_000

// mostSearched bounds how many rows one statement looks at. A variable for tests.
var mostSearched = 1_000_000

// step is a part of the way of the progress: from behind an id, nil for all, to another one. Holes up to
// ended go.
type step struct {
	from      *int64
	to, ended int64
}

// stepSQL is how far from id $1 towards id $2 the next step goes: $3 rows lie between.
func stepSQL(t *outbox.Table) string {
	return journalSQL(t, `
WITH open AS MATERIALIZED (SELECT {open} AS ids)
SELECT CASE count(*) WHEN $3 THEN max(x.id) ELSE $2 END
FROM (SELECT e.id FROM open o, unnest(o.ids) r, LATERAL (SELECT e.{id}::bigint AS id FROM {table} e
		WHERE `+WithinSQL("e.{id}")+` ORDER BY e.{id} LIMIT $3) e
	LIMIT $3) x`, "{open}", betweenSQL(t, "$1", "$2"))
}

// take defers the rows of a step that are due later, and writes the progress if no other row is pending
// there, of any shard.
func (db *DB) take(ctx context.Context, t *outbox.Table, s step, a *Advance) (done bool, err error) {
	events := "true" // rows that do not fit are none
	if fits := t.WhereSQL("t"); fits != "" {
		events = fits
	}
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if t.Layout.Has(outbox.AvailableAt) {
			if err := deferLater(ctx, conn, t, s, events); err != nil {
				return err
			}
		}
		begun := time.Now()
		var partitions, rows int64
		var left, was string
		var isWhole bool
		// Asked before the search: one that is attached meanwhile may not be in its plan.
		err := conn.QueryRow(ctx, `SELECT `+PartitionsSQL(t)).Scan(&partitions)
		if err == nil {
			err = conn.QueryRow(ctx, toSettleSQL(t, events), s.from, s.to, s.ended).
				Scan(&rows, &left, &was, &isWhole)
		}
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		// What was found stays so: a row has an entry or a deferral, and gets the other one. The search may
		// take long, and holds no lock for which records and marks would wait.
		tag, err := conn.Exec(ctx, settledSQL(t), s.from, s.to, left, mostHoles, was, partitions)
		done = tag.RowsAffected() == 1
		if isWhole {
			a.whole = &Search{}
		}
		if done && a.whole != nil {
			a.whole.Rows += rows
			a.whole.Took += time.Since(begun)
		}
		return err
	})
	return done, err
}

// deferLater writes deferrals of rows of a step that are due later. It looks for them before it takes the
// lock.
func deferLater(ctx context.Context, conn *pgx.Conn, t *outbox.Table, s step, events string) error {
	later := func(ids string) string {
		return journalSQL(t, `{undeferred} t WHERE t.{available} > now() AND {events} AND {bound}`,
			"{undeferred}", inTurnSQL(t, ids), "{events}", events)
	}
	var ids *string // nil: none
	err := conn.QueryRow(ctx, journalSQL(t, `SELECT range_agg(int8range(x.id, x.id, '[]'))::text
		FROM (SELECT t.{id} AS id FROM {later} ORDER BY t.{id} LIMIT $3) x`,
		"{later}", later(betweenSQL(t, "$1", "$2"))), s.from, s.to, mostDeferred).Scan(&ids)
	if err != nil || ids == nil {
		return err
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		err := LockMoves(ctx, tx, t)
		if err == nil {
			_, err = tx.Exec(ctx, journalSQL(t, `
				INSERT INTO {deferred} (outbox, id, available_at, aggregate_hash, partition_oid)
				SELECT {outbox}, t.{id}, t.{available}, {hash}, t.tableoid FROM {later}`,
				"{later}", later(journalSQL(t, openOfSQL))), *ids)
		}
		return err
	})
}

const (
	// progressSQL is the row k that has the progress of an outbox.
	progressSQL = `{known} k WHERE k.outbox = {outbox} AND k.condition = {condition}`
	// SettledSQL is the id up to which a row k of outbox_known is settled, but for its holes. It is NULL
	// where nothing is settled.
	SettledSQL = `(SELECT nullif(lower(r), '-9223372036854775808') - 1
		FROM unnest(k.unsettled) r WHERE upper_inf(r))`
	holesSQL = `(SELECT count(*)::int - 1 FROM unnest(k.unsettled))`
	// mostSettled bounds it: the last range has an id always.
	mostSettled = math.MaxInt64 - 1
)

// toSettleSQL finds which ids would be left if the progress went from id $1 to id $2, without holes up to
// $3, and what the progress is. It returns no row where an event is pending there, or the progress is one of
// other partitions, or of another table.
func toSettleSQL(t *outbox.Table, events string) string {
	return journalSQL(t, `
WITH open AS MATERIALIZED (
	SELECT {open} AS ids, `+unsettledSQL+` AS was
)
SELECT s.rows, (o.ids - int8multirange(int8range(NULL, $3::bigint, '(]')) - s.ids)::text, o.was::text,
	o.was @> -9223372036854775808
FROM open o, LATERAL (
	SELECT count(*) AS rows, coalesce(range_agg(int8range(e.{id}, e.{id}, '[]')), '{}') AS ids
	FROM unnest(o.ids) r, LATERAL (SELECT e.{id} FROM {table} e
		WHERE `+WithinSQL("e.{id}")+` OFFSET 0) e) s
WHERE EXISTS (SELECT FROM `+progressSQL+` AND {same})
	AND NOT EXISTS (SELECT FROM {undeferred} t WHERE {events})`,
		"{same}", sameTableSQL(t), "{open}", betweenSQL(t, "$1", "$2"),
		"{undeferred}", inTurnSQL(t, betweenSQL(t, "$1", "$2")), "{events}", events)
}

// steady has f run statements for which no partition may come or go meanwhile. A statement may wait for locks
// behind its plan, and partitions that are attached by then are not in that. Where that was so, nothing is
// done.
func steady(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, f func(pgx.Tx) error,
) (done bool, err error) {
	changed := errors.New("the partitions changed")
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		var before, after int64
		err := tx.QueryRow(ctx, `SELECT `+PartitionsSQL(t)).Scan(&before)
		if err == nil {
			err = f(tx)
		}
		if err == nil {
			err = tx.QueryRow(ctx, `SELECT `+PartitionsSQL(t)).Scan(&after)
		}
		if err == nil && after != before {
			err = changed
		}
		return err
	})
	if errors.Is(err, changed) {
		return false, nil
	}
	return err == nil, err
}

// inTurnSQL is undeferredSQL, range by range (OFFSET 0). Statistics may have the planner read the whole table
// once instead, and hold each row against each range.
func inTurnSQL(t *outbox.Table, ids string) string {
	return journalSQL(t, "(SELECT e.* FROM unnest({ids}) r, LATERAL (SELECT * FROM "+inRangeSQL+
		" e OFFSET 0) e)", "{ids}", ids)
}

// settledSQL writes the progress of a step from id $1 to id $2, with the ids $3 left, and about $4 ranges of
// them at most up to there. It writes nothing where the progress has become void since it was $5, or the
// partitions are not those of $6. What the relay of another shard has settled meanwhile stays so.
func settledSQL(t *outbox.Table) string {
	return journalSQL(t, `
UPDATE {known} k SET updated_at = now(), unsettled = (
	SELECT CASE WHEN (SELECT count(*) FROM unnest(u.ids)) <= $4
		THEN k.unsettled * (u.ids + {above}) ELSE (
		SELECT range_agg(int8range(lower(r) / s.size * s.size,
			least(((upper(r) - 1) / s.size * s.size)::numeric + s.size, $2 + 1)::bigint))
		FROM unnest(u.ids) r, (SELECT ($2 - lower(u.ids)) / $4 + 1 AS size) s) + {above} END
	FROM (SELECT $3::int8multirange + CASE WHEN $1::bigint IS NULL THEN '{}'
		ELSE k.unsettled * int8multirange(int8range(NULL, $1, '(]')) END AS ids) u)
WHERE k.outbox = {outbox} AND k.condition = {condition} AND k.unsettled <@ $5::int8multirange
	AND k.partitions = $6 AND {same}`,
		"{above}", "int8multirange(int8range($2::bigint, NULL, '()'))", "{same}", sameTableSQL(t))
}

// sameTableSQL is the condition that a row k of outbox_known is of the table as it is.
func sameTableSQL(t *outbox.Table) string {
	return fmt.Sprintf("k.table_oid = to_regclass(%s) AND k.partitions = %s",
		outbox.QuoteLiteral(t.SQL()), PartitionsSQL(t))
}
