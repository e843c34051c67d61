package table

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Walpost's tables for outboxes with mark journal: see outbox.Journal.
const (
	JournalEntries  = "outbox_journal"
	JournalDeferred = "outbox_deferred"
)

// journaled is outbox.MarkJournal. A row is marked when an entry of the journal has its id, and recorded when
// a deferral says why it waits. The rows themselves are neither changed nor locked.
type journaled struct{}

func (journaled) Stays() bool { return true }

// journalSQL fills in a statement over the journal of t: its tables, {outbox} as a literal, {table} and {id}
// of the outbox, and {hash} of a row t's aggregate. more are further names with their texts. Nothing is
// filled in within those: the condition of an outbox may hold a text such as '{id}'.
func journalSQL(t *outbox.Table, sql string, more ...string) string {
	due := "NULL::timestamptz"
	if !t.Layout.InJournal(outbox.AvailableAt) && t.Layout.Has(outbox.AvailableAt) {
		due = "e." + outbox.QuoteIdent(t.Layout.Columns[outbox.AvailableAt])
	}
	hash := t.AggregateHashSQL("t")
	if hash == "" {
		hash = "NULL"
	}
	return strings.NewReplacer(append(more,
		"{entries}", t.Journal.Entries, "{deferred}", t.Journal.Deferred, "{known}", t.Journal.Known,
		"{condition}", outbox.QuoteLiteral(t.Where), "{bound}", BoundSQL(t),
		"{outbox}", outbox.QuoteLiteral(t.String()), "{table}", t.SQL(), "{id}", t.Column(outbox.ID),
		"{due}", due, "{processed}", t.Column(outbox.ProcessedAt), "{attempts}", t.Column(outbox.Attempts),
		"{error}", t.Column(outbox.LastError), "{available}", t.Column(outbox.AvailableAt), "{hash}", hash,
		"{within}", WithinSQL("e."+t.Column(outbox.ID)),
	)...).Replace(sql)
}

// WithinSQL is the condition that an id is in a range r. One without an upper bound has the greatest id.
func WithinSQL(id string) string {
	return fmt.Sprintf("%s >= lower(r) AND %[1]s <= coalesce(upper(r) - 1, %d)", id, math.MaxInt64)
}

// BoundSQL is the condition that a table is still the one that the outbox is bound to: somebody may have
// renamed it, and made another one. It is evaluated once for a statement, which has the table's lock by then.
func BoundSQL(t *outbox.Table) string {
	if t.OID == 0 {
		return "true"
	}
	return fmt.Sprintf("to_regclass(%s) = %d", outbox.QuoteLiteral(t.SQL()), t.OID)
}

// presentSQL is BoundSQL, and that the table has the partitions that it had: a row whose partition is
// detached is not gone, and one that has come back with its partition may be in the stream already.
func presentSQL(t *outbox.Table) string {
	if !t.Partitioned {
		return BoundSQL(t)
	}
	return fmt.Sprintf("%s AND %s = %d", BoundSQL(t), PartitionsSQL(t), t.Partitions)
}

// The columns of an outbox's rows that a statement may name, system columns among them.
const rowColumns = "e.*, e.tableoid, e.ctid, e.xmin"

// entriesOfSQL are the entries j of the journal that have one of the wanted ids, a multirange. GiST finds
// them by their ranges.
//
// A statement makes them once, for all rows that it asks for, and never row by row. PostgreSQL's GiST keeps
// a note of dead tuples from one scan of a statement to the next: while the index is a single page, their
// places stay noted. If another session splits that page meanwhile, the next scan marks those tuples dead
// that have these places in a new one. No search by the index finds such an entry any more, and its rows are
// sent again (TestIndexOfEntriesSplits).
func entriesOfSQL(wanted string) string {
	return "{entries} j WHERE j.outbox = {outbox} AND range_merge(j.ids) && " + wanted +
		" AND j.ids && " + wanted
}

// undeferredSQL is the pending rows without a deferral whose ids are among some open ones, in any order.
func undeferredSQL(t *outbox.Table, ids string) string {
	return journalSQL(t, "(SELECT e.* FROM unnest({ids}) r, LATERAL "+inRangeSQL+" e)", "{ids}", ids)
}

// betweenSQL are the open ids behind an argument, which may be NULL, and up to another one. There are few
// below the greatest journaled one: rows that were rolled back, or that wait.
func betweenSQL(t *outbox.Table, from, to string) string {
	return journalSQL(t, openSQL+` * int8multirange(int8range({from}::bigint, {to}::bigint, '(]'))`,
		"{from}", from, "{to}", to)
}

const (
	undeferredColumns = `NULL::smallint AS {attempts}, NULL::text AS {error}, {due} AS {available},
		NULL::timestamptz AS {processed}, NULL::bigint AS ` + aggregateHash

	notDeferredSQL = `NOT EXISTS (SELECT FROM {deferred} d WHERE d.outbox = {outbox} AND d.id = e.{id})`

	// widthSQL is how many ids are in a range r.
	widthSQL = `(coalesce(upper(r)::numeric, 9223372036854775808) - lower(r))`

	// inRangeSQL is the rows without a deferral whose ids are in a range r.
	inRangeSQL = `(SELECT ` + rowColumns + `, ` + undeferredColumns + ` FROM {table} e
		WHERE {within} AND ` + notDeferredSQL + `)`

	// everySQL is every id, as it stands in outbox_known where nothing is settled.
	everySQL = `'{[-9223372036854775808,)}'`

	// unsettledSQL is the ids of which the progress knows nothing.
	unsettledSQL = `coalesce((SELECT k.unsettled FROM {known} k
		WHERE k.outbox = {outbox} AND k.condition = {condition}), ` + everySQL + `)`

	// unsettledByAnySQL is the ids of which the progress of some condition knows nothing.
	unsettledByAnySQL = `coalesce((SELECT range_agg(r) FROM {known} k, unnest(k.unsettled) r
		WHERE k.outbox = {outbox}), ` + everySQL + `)`

	// openOfSQL are those of some ids, $1, that no entry has.
	openOfSQL = `($1::int8multirange - coalesce((SELECT range_agg(r) FROM {entries} j, unnest(j.ids) r
		WHERE j.outbox = {outbox} AND range_merge(j.ids) && $1::int8multirange), '{}'))`

	// openSQL is the unsettled ids that no entry has. A statement makes it once.
	openSQL = `(SELECT u.ids - coalesce((SELECT range_agg(r) FROM {entries} j, unnest(j.ids) r
			WHERE j.outbox = {outbox} AND range_merge(j.ids) && u.ids), '{}')
		FROM (SELECT ` + unsettledSQL + ` AS ids OFFSET 0) u)`
)

// source implements Mark.
func (journaled) source(t *outbox.Table) source {
	waiting := journalSQL(t, `(SELECT `+rowColumns+`, `+deferredColumns+`,
			NULL::timestamptz AS {processed}, d.aggregate_hash AS `+aggregateHash+`
		FROM {deferred} d JOIN {table} e ON e.{id} = d.id WHERE d.outbox = {outbox})`)
	open := journalSQL(t, openSQL)
	inRange := journalSQL(t, inRangeSQL)
	return source{
		free: " AND " + freeDeferralSQL(t, "t."+t.Column(outbox.ID),
			"f.attempts = coalesce(t."+t.Column(outbox.Attempts)+", 0)"),
		all:     func(ids string) string { return allSQL(t, rangesSQL(ids)) },
		pending: "(SELECT * FROM " + undeferredSQL(t, open) + " t UNION ALL " + waiting + ")",
		first:   []search{{over: "unnest(" + open + ") r, ", pending: inRange}, {pending: waiting}},
		due: "(SELECT e.* FROM unnest(" + open + ") r, LATERAL (SELECT * FROM " + inRange + " e ORDER BY e." +
			t.Column(outbox.ID) + " LIMIT 1000) e UNION ALL " + waiting + ")",
		// OFFSET 0: the entries come first, in the order of an index, and each has its rows looked up.
		marked: journalSQL(t, `(SELECT e.*, `+markedColumns+`
		FROM {entries} j, unnest(j.ids) r, LATERAL (SELECT `+rowColumns+` FROM {table} e
			WHERE {within} OFFSET 0) e
		WHERE j.outbox = {outbox} AND j.kind = 'stored')`),
		markedByID: func(ids string) string {
			return journalSQL(t, `(WITH `+marksSQL(rangesSQL(ids), " AND j.kind = 'stored'")+`
		SELECT `+rowColumns+`, `+markedColumns+`
		FROM {table} e JOIN marks j ON j.id = e.{id})`)
		},
		lock: "OFFSET 0", // else the rows of all would be read, and not those that are asked for
		page: journalSQL(t, `SELECT coalesce(min(at) FILTER (WHERE ids >= $2),
			CASE count(*) WHEN 1000 THEN max(at) END)
		FROM (SELECT j.processed_at AS at, sum({count}) OVER (ORDER BY j.processed_at) AS ids
			FROM (SELECT j.processed_at, j.ids FROM {entries} j
				WHERE j.outbox = {outbox} AND j.kind = 'stored' AND j.processed_at >= $1
				ORDER BY j.processed_at LIMIT 1000) j) j`,
			"{count}", "(SELECT sum("+widthSQL+") FROM unnest(j.ids) r)"),
	}
}

// freeDeferralSQL is the condition that no other session has locked the deferral f of a row, and locks it. It
// has to be so, as it is then.
func freeDeferralSQL(t *outbox.Table, id, so string) string {
	const deferral = `SELECT {so} FROM {deferred} f WHERE f.outbox = {outbox} AND f.id = {row} LIMIT 1`
	return journalSQL(t, "(("+deferral+") IS NULL OR ("+deferral+" FOR UPDATE SKIP LOCKED))",
		"{row}", id, "{so}", so)
}

// allSQL is every row, with the time of its mark where its id is among the wanted ones, a multirange.
func allSQL(t *outbox.Table, wanted string) string {
	return journalSQL(t, `(WITH `+marksSQL(wanted, "")+`
		SELECT `+rowColumns+`, `+deferredColumns+`,
			(SELECT m.processed_at FROM marks m WHERE m.id = e.{id}) AS {processed}
		FROM {table} e LEFT JOIN {deferred} d ON d.outbox = {outbox} AND d.id = e.{id})`)
}

// marksSQL is a CTE with the time of the last mark of each wanted id that has one.
func marksSQL(wanted, and string) string {
	return `marks AS MATERIALIZED (SELECT g.id, max(j.processed_at) AS processed_at
			FROM (SELECT j.processed_at, unnest(j.ids * ` + wanted + `) AS r
				FROM ` + entriesOfSQL(wanted) + and + `) j,
				generate_series(lower(j.r), coalesce(upper(j.r) - 1, 9223372036854775807)) AS g(id)
			GROUP BY 1)`
}

// givenIDs are the ids of $1, for [source.all].
const givenIDs = "(SELECT unnest($1::text[])::bigint AS id)"

const deferredColumns = `d.attempts AS {attempts}, d.last_error AS {error},
	coalesce(d.available_at, {due}) AS {available}`

const markedColumns = `NULL::smallint AS {attempts}, NULL::text AS {error}, {due} AS {available},
	j.processed_at AS {processed}`

// aggregateHash is a column of pending rows that have a deferral: an index answers to it.
const aggregateHash = `"deferred.aggregate_hash"`

// LookUpInserted is LookUp for rows that the WAL brings. Of a table with a journal it asks the journal first:
// a row that is in the table, that the progress does not know, and that is in neither of the journal's tables
// is pending.
func (db *DB) LookUpInserted(ctx context.Context, t *outbox.Table, rows []Row) ([]State, error) {
	if !Journals(t) {
		return db.LookUp(ctx, t, rows)
	}
	known, marked, err := db.known(ctx, t, rows)
	if err != nil {
		return nil, err
	}
	states := make([]State, len(rows))
	for i := range states {
		states[i] = State{Exists: true, Same: true, Pending: true, Visible: true}
	}
	if len(known) == 0 {
		return states, nil
	}
	some := make([]Row, len(known))
	for i, n := range known {
		some[i] = rows[n]
	}
	asked, err := db.LookUp(ctx, t, some)
	if err != nil {
		return nil, err
	}
	for i, n := range known {
		if states[n] = asked[i]; marked[i] && !asked[i].Visible {
			states[n].Visible = true // it is delivered, whenever the table shows it
		}
	}
	return states, nil
}

// known are the indexes of the rows that the journal may know, and which of these have an entry.
func (db *DB) known(
	ctx context.Context, t *outbox.Table, rows []Row,
) (known []int, marked []bool, err error) {
	ids, err := idsOf(rows)
	if err == nil {
		err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			result, _ := conn.Query(ctx, knownSQL(t), ids, ranges(slices.Clone(ids)))
			var n int
			var has bool
			_, err := pgx.ForEachRow(result, []any{&n, &has}, func() error {
				known, marked = append(known, n), append(marked, has)
				return nil
			})
			return err
		})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look up rows of %s in the journal: %w", t, err)
	}
	return known, marked, nil
}

// TakenTo is an id that no row which was delivered exceeds. Where the progress is void, it is the last id
// that was drawn.
func (db *DB) TakenTo(ctx context.Context, t *outbox.Table) (id int64, err error) {
	err = db.QueryRow(ctx, []any{&id}, takenToSQL(t))
	if err != nil {
		err = fmt.Errorf("look for the last id of %s: %w", t, err)
	}
	return id, err
}

func takenToSQL(t *outbox.Table) string {
	return journalSQL(t, `WITH p AS MATERIALIZED (
			SELECT coalesce((SELECT `+SettledSQL+` FROM `+progressSQL+`),
				pg_sequence_last_value(pg_get_serial_sequence({regclass}, {column})::regclass), 0) AS settled)
		SELECT greatest(p.settled,
			(SELECT max(upper(r)) - 1 FROM {entries} j, unnest(j.ids) r
				WHERE j.outbox = {outbox} AND range_merge(j.ids) && int8range(p.settled, NULL, '()')),
			(SELECT max(d.id) FROM {deferred} d WHERE d.outbox = {outbox}))
		FROM p`, "{regclass}", outbox.QuoteLiteral(t.SQL()),
		"{column}", outbox.QuoteLiteral(t.Layout.Columns[outbox.ID]))
}

func knownSQL(t *outbox.Table) string {
	return journalSQL(t, `WITH marked AS MATERIALIZED (SELECT coalesce(range_agg(r), '{}') AS ids
			FROM {entries} j, unnest(j.ids) r WHERE j.outbox = {outbox}
				AND range_merge(j.ids) && $2::int8multirange AND r && $2)
		SELECT w.ord::int - 1, m.ids @> w.id
		FROM marked m, unnest($1::bigint[]) WITH ORDINALITY AS w(id, ord)
		WHERE NOT (SELECT `+unsettledSQL+`) @> w.id
			OR NOT EXISTS (SELECT FROM {table} e WHERE e.{id} = w.id OFFSET 0)
			OR m.ids @> w.id
			OR w.id = ANY (ARRAY(SELECT d.id FROM {deferred} d
				WHERE d.outbox = {outbox} AND d.id = ANY ($1::bigint[])))
		ORDER BY 1`)
}

// set implements Mark: it writes deferrals.
func (journaled) set(t *outbox.Table, s *sets) string {
	columns := map[outbox.Field]string{
		outbox.Attempts: "attempts", outbox.LastError: "last_error", outbox.AvailableAt: "available_at",
	}
	var names, values, updates []string
	for _, f := range []outbox.Field{outbox.Attempts, outbox.LastError, outbox.AvailableAt} {
		value := "t." + t.Column(f)
		if v, ok := s.value(f); ok {
			value = v
		}
		if f == outbox.Attempts {
			value = "coalesce(" + value + ", 0)"
		}
		names, values = append(names, columns[f]), append(values, value)
		updates = append(updates, columns[f]+" = EXCLUDED."+columns[f])
	}
	return journalSQL(t, `INSERT INTO {deferred} AS d (outbox, id, aggregate_hash, partition_oid, {names})
		SELECT {outbox}, t.{id}, {hash}, t.tableoid, {values} FROM {all} t
		WHERE t.{id} = ANY (ARRAY(SELECT f.id FROM free f))
		ON CONFLICT (outbox, id) DO UPDATE SET {updates} RETURNING id`,
		"{names}", strings.Join(names, ", "), "{values}", strings.Join(values, ", "),
		"{updates}", strings.Join(updates, ", "), "{all}", sourceOf(t).all("free"))
}

// mark implements Mark. An entry needs no row: it lies behind its rows in the WAL, and so no failover keeps
// it without them. Only for the verdict [Gone] some rows are looked for.
func (journaled) mark(ctx context.Context, db *DB, t *outbox.Table, rows []Row) ([]Verdict, error) {
	ids, err := idsOf(rows)
	verdicts := make([]Verdict, len(rows))
	if err == nil {
		// Before the entry is written: once it is, anybody may delete its rows.
		for _, i := range db.sampleGone(ctx, t, rows) {
			verdicts[i] = Gone
		}
		err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			result, _ := conn.Query(ctx, db.markSQL(t, entrySQL), ranges(ids))
			var locked string
			_, err := pgx.ForEachRow(result, []any{&locked}, func() error {
				for i := range rows {
					if rows[i].Ref.ID == locked {
						verdicts[i] = Locked
					}
				}
				return nil
			})
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("journal rows of %s: %w", t, err)
	}
	return verdicts, nil
}

// entrySQL journals the ids of $1 as stored. What waited does not wait any more. It leaves out the rows whose
// deferral another session has locked, and returns their ids.
func entrySQL(t *outbox.Table) string {
	return journalSQL(t, `
WITH waited AS MATERIALIZED (
	SELECT d.id, {free} AS free FROM unnest($1::int8multirange) r, {deferred} d
	WHERE d.outbox = {outbox} AND {waiting}
		AND EXISTS (SELECT FROM {deferred} WHERE outbox = {outbox})
), locked AS MATERIALIZED (
	SELECT id FROM waited WHERE free IS NOT TRUE
), stored AS MATERIALIZED (
	SELECT $1::int8multirange - coalesce({locked}, '{}') AS ids
), put AS (
	INSERT INTO {entries} (outbox, kind, ids)
	SELECT {outbox}, 'stored', ids FROM stored WHERE NOT isempty(ids)
), delivered AS (
	DELETE FROM {deferred} d
	WHERE d.outbox = {outbox} AND d.id = ANY (ARRAY(SELECT id FROM waited WHERE free))
)
SELECT id::text FROM locked WHERE `+besideSQL+` AND `+pg.OwnPath,
		"{free}", freeDeferralSQL(t, "d.id", "true"), "{locked}", rangesSQL("locked"),
		"{waiting}", WithinSQL("d.id"))
}

// mostSampled bounds the rows that sampleGone looks for.
const mostSampled = 16

// sampleGone looks for some of the rows that the WAL has told. It returns the indexes of those that the
// table does not have although their transactions are visible. It waits for no lock of the table, and an
// error leaves the rows unknown: a mark does not depend on it.
func (db *DB) sampleGone(ctx context.Context, t *outbox.Table, rows []Row) (gone []int) {
	var some []Row
	var at []int
	for i := 0; i < len(rows); i += 1 + (len(rows)-1)/mostSampled {
		if rows[i].XID != 0 {
			some, at = append(some, rows[i]), append(at, i)
		}
	}
	if len(some) == 0 {
		return nil
	}
	_ = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		a := db.args(some)
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			var b pgx.Batch
			b.Queue("LOCK TABLE " + t.SQL() + " IN ACCESS SHARE MODE NOWAIT")
			b.Queue(goneSQL(t), a.ids.value(), a.xids.value()).Query(func(result pgx.Rows) error {
				var n int
				_, err := pgx.ForEachRow(result, []any{&n}, func() error {
					gone = append(gone, at[n])
					return nil
				})
				return err
			})
			return tx.SendBatch(ctx, &b).Close()
		})
	})
	return gone
}

// goneSQL numbers, from 0, the ids of $1 that no row has although the transactions $2 are visible. While a
// partition is detached, rows may be there.
func goneSQL(t *outbox.Table) string {
	return journalSQL(t, `SELECT w.ord::int - 1
		FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS w(id, xid, ord)
		WHERE pg_visible_in_snapshot(w.xid::xid8, pg_current_snapshot())
			AND CASE WHEN EXISTS (SELECT FROM {table} t WHERE t.{id} = w.id::{type} OFFSET 0) THEN false
				ELSE NOT EXISTS `+detachedSQL(t)+` END
			AND {bound} AND `+pg.OwnPath, "{type}", t.IDType)
}

func idsOf(rows []Row) ([]int64, error) {
	ids := make([]int64, len(rows))
	for i, r := range rows {
		id, err := strconv.ParseInt(r.Ref.ID, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("id %q: %w", r.Ref.ID, err)
		}
		ids[i] = id
	}
	return ids, nil
}

// rangesOf are the rows' ids as an int8multirange. What is no number is the id of no row.
func rangesOf(rows []Row) string {
	ids := make([]int64, 0, len(rows))
	for _, r := range rows {
		if id, err := strconv.ParseInt(r.Ref.ID, 10, 64); err == nil {
			ids = append(ids, id)
		}
	}
	return ranges(ids)
}

// ranges is an int8multirange of ids, which it sorts.
func ranges(ids []int64) string {
	slices.Sort(ids)
	b := []byte{'{'}
	for i := 0; i < len(ids); {
		first := ids[i]
		last := first
		for i++; i < len(ids) && ids[i]-1 <= last; i++ {
			last = ids[i]
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(strconv.AppendInt(append(b, '['), first, 10), ',')
		if last < math.MaxInt64 { // else the range has no bound: PostgreSQL's would be greater by 1
			b = strconv.AppendInt(b, last+1, 10)
		}
		b = append(b, ')')
	}
	return string(append(b, '}'))
}

// aggregateHashSQL implements Mark.
func (journaled) aggregateHashSQL(*outbox.Table) string { return "t." + aggregateHash }

// deadSQL implements Mark.
func (journaled) deadSQL(t *outbox.Table, alias, ids string) string {
	return journalSQL(t, "coalesce((SELECT range_agg(m.r) FROM (SELECT unnest(j.ids) AS r FROM "+
		entriesOfSQL(rangesSQL(ids))+" AND j.kind = 'dead') m) @> "+alias+".{id}::bigint, false)")
}

// rangesSQL are the ids of a CTE as an int8multirange.
func rangesSQL(cte string) string {
	return "(SELECT range_agg(int8range(x.id, nullif(x.id, 9223372036854775807) + 1)) FROM " + cte + " x)"
}

// unmarkSQL implements Mark: it takes the ids out of their entries and defers the rows.
func (j journaled) unmarkSQL(t *outbox.Table, same string) string {
	return journalSQL(t, `
WITH free AS MATERIALIZED (
	SELECT w.ord, t.{id} AS id FROM unnest($1::text[], $2::bigint[], $3::timestamptz[])
		WITH ORDINALITY AS w(id, hash, mark, ord) JOIN {byid} ON {same}
), gone AS (
	UPDATE {entries} j SET ids = j.ids - {ranges} WHERE j.outbox = {outbox}
		AND range_merge(j.ids) && range_merge({ranges}) AND j.ids && {ranges}
), done AS ({set})
SELECT min(ord)::int, false FROM free WHERE {own} GROUP BY id ORDER BY 1`,
		"{byid}", byIDSQL(t, sourceOf(t).all(givenIDs), ""), "{same}", same, "{ranges}", rangesSQL("free"),
		"{set}", j.set(t, pendingSets(t, lostNote)), "{own}", pg.OwnPath)
}

// toSkipSQL finds the ids of the pending rows of a table, as a text.
func toSkipSQL(t *outbox.Table) string {
	return journalSQL(t, `WITH pending AS (SELECT t.{id} AS id FROM {pending} t WHERE {fits} AND {bound})
		SELECT coalesce({ranges}, '{}')::text`,
		"{pending}", sourceOf(t).pending, "{fits}", PendingSQL(t, "t"), "{ranges}", rangesSQL("pending"))
}

// skipSQL implements Mark.
func (journaled) skipSQL(t *outbox.Table) string {
	return journalSQL(t, `
WITH skipped AS MATERIALIZED (
	SELECT `+openOfSQL+` AS ids
), put AS (
	INSERT INTO {entries} (outbox, kind, ids)
	SELECT {outbox}, 'skipped', ids FROM skipped WHERE NOT isempty(ids)
), undeferred AS (
	DELETE FROM {deferred} d USING skipped x WHERE d.outbox = {outbox} AND x.ids @> d.id
)
SELECT coalesce(sum(`+widthSQL+`), 0)::bigint
FROM skipped, unnest(ids) r WHERE {own}`,
		"{own}", pg.OwnPath)
}

// deadLetterSQL implements Mark.
func (journaled) deadLetterSQL(t *outbox.Table, letters string) string {
	return letterAndEntrySQL(t, letters, t.SQL(), "t", originalSQL(t, "c.original"), "")
}

// keepSQL implements Mark.
func (journaled) keepSQL(t *outbox.Table, letters, original string) string {
	return letterAndEntrySQL(t, letters, sourceOf(t).all("free"), original, "c.original", keptNote)
}

// letterAndEntrySQL copies rows into the dead letters, and journals them as dead. original is what the letter
// has of a row t of from, and rendered is that as JSON. note follows the failure.
func letterAndEntrySQL(t *outbox.Table, letters, from, original, rendered, note string) string {
	change := journalSQL(t, `SELECT t.{id} AS id, {original} AS original, (SELECT d.attempts
			FROM {deferred} d WHERE d.outbox = {outbox} AND d.id = t.{id}) AS attempts
		FROM {from} t WHERE t.{id} = ANY (ARRAY(SELECT f.id FROM free f))`,
		"{original}", original, "{from}", from)
	return settleSQL(t, sameSQL(t), change, journalSQL(t, `, letter AS MATERIALIZED (
	SELECT concat(c.id) AS row_id, {rendered} AS original, c.attempts,
		(SELECT f.failure FROM free f WHERE f.id = c.id LIMIT 1) || {note} AS failure
	FROM changed c
), moved AS ({letter}), dead AS (
	INSERT INTO {entries} (outbox, kind, ids)
	SELECT {outbox}, 'dead', {ranges} WHERE EXISTS (SELECT FROM changed)
), undeferred AS (
	DELETE FROM {deferred} d USING changed c WHERE d.outbox = {outbox} AND d.id = c.id
)`, "{rendered}", rendered, "{note}", outbox.QuoteLiteral(note), "{letter}", letterSQL(t, letters),
		"{ranges}", rangesSQL("changed")))
}

// DeleteJournaled deletes the rows that entries from before a moment name, and those entries, the oldest
// first: of so many entries at most. It returns how many of both there were. Rows that the progress does not
// know stay: one that the WAL brings again would look new. So do all while a partition is detached: its rows
// have their marks in the entries (Detached).
func (db *DB) DeleteJournaled(
	ctx context.Context, t *outbox.Table, before time.Time, most int,
) (entries int, rows int64, err error) {
	sql := journalSQL(t, `
WITH old AS MATERIALIZED (
	SELECT j.ctid AS place, j.ids FROM {entries} j
	WHERE j.outbox = {outbox} AND j.processed_at < $1 AND {bound}
		AND NOT j.ids && (SELECT `+unsettledByAnySQL+`) AND NOT EXISTS `+detachedSQL(t)+`
	ORDER BY j.processed_at LIMIT $2 FOR UPDATE SKIP LOCKED
), gone AS (
	DELETE FROM {table} t USING old o, unnest(o.ids) r
	WHERE `+WithinSQL("t.{id}")+` RETURNING 1
), forgotten AS (
	DELETE FROM {entries} j WHERE j.ctid = ANY (ARRAY(SELECT o.place FROM old o)) RETURNING 1
)
SELECT (SELECT count(*)::int FROM forgotten), (SELECT count(*) FROM gone)
WHERE `+besideSQL+` AND `+pg.OwnPath)
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		done, err := steady(ctx, conn, t, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, sql, before, most).Scan(&entries, &rows)
		})
		if !done {
			entries, rows = 0, 0
		}
		return err
	})
	return entries, rows, err
}

// ForgetDeferred deletes the deferrals of rows that somebody has deleted, be it with their partition: those
// are events no more. A partition that is detached keeps them.
func (db *DB) ForgetDeferred(ctx context.Context, t *outbox.Table) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := steady(ctx, conn, t, func(tx pgx.Tx) error {
			parts := `(SELECT to_regclass({regclass})::oid AS oid
				UNION SELECT relid FROM pg_partition_tree(to_regclass({regclass})))`
			parts = strings.ReplaceAll(parts, "{regclass}", outbox.QuoteLiteral(t.SQL()))
			_, err := tx.Exec(ctx, journalSQL(t, `DELETE FROM {deferred} d
				WHERE d.outbox = {outbox} AND NOT EXISTS (SELECT FROM {table} e WHERE e.{id} = d.id)
					AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = d.partition_oid
						AND c.oid NOT IN {parts})
					AND {bound} AND `+pg.OwnPath, "{parts}", parts))
			return err
		})
		return err
	})
}

// wakeSQL implements Mark: the ids of the CTE "free" are taken out of their entries, and deferred.
func (j journaled) wakeSQL(t *outbox.Table, s *sets) string {
	return journalSQL(t, `taken AS (
	UPDATE {entries} j SET ids = j.ids - {ranges} WHERE j.outbox = {outbox}
		AND range_merge(j.ids) && range_merge({ranges}) AND j.ids && {ranges}
), deferred AS ({set}), woken AS (SELECT concat(d.id) AS id FROM deferred d)`,
		"{ranges}", rangesSQL("free"), "{set}", j.set(t, s))
}
