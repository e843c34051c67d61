package table

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// CheckReplayable reports why no row of an outbox can be published again.
func CheckReplayable(t *outbox.Table) error {
	if MarkOf(t).Stays() {
		return nil
	}
	return hint.Errorf("a consumer can read the stream again: `walpost consumers rewind`",
		"outbox %s: mark %q leaves no delivered rows that could be published again", t, t.Mark)
}

// InspectDelivered reads what a table is of which delivered rows are looked for. The relay's privileges on it
// are not needed.
func (db *DB) InspectDelivered(ctx context.Context, t *outbox.Table) error {
	now, problems, err := db.Inspect(ctx, t)
	if err != nil {
		return err
	}
	*t = now
	return slices.DeleteFunc(problems, func(f check.Finding) bool {
		return f.Code == "table-privileges" || f.Code == "table-dead-letters-missing"
	}).FirstError()
}

// SetAggregate narrows the choice to the aggregates TYPE, or to the one TYPE/ID. Empty is no limit.
func (c *ReplayChoice) SetAggregate(text string) {
	kind, id, one := strings.Cut(text, "/")
	if text == "" {
		return
	}
	if c.AggregateType = &kind; one {
		c.AggregateID = &id
	}
}

// replaySource are the delivered rows of an outbox, in it and in the archive.
type replaySource struct {
	table *outbox.Table
	// relations are the outbox and the archive, each with the condition under which a row is one of those.
	relations [][2]string
	where     string
	args      []any
}

func (db *DB) replaySource(ctx context.Context, t *outbox.Table, c ReplayChoice) (*replaySource, error) {
	fits := t.WhereSQL("t")
	if fits == "" {
		fits = "true"
	}
	fits += " AND " + BoundSQL(t)
	rows := sourceOf(t).marked
	if c.IDs != nil {
		rows = sourceOf(t).markedByID(givenIDs) // the first argument
	} else if Journals(t) {
		rows = markedOnceSQL(t, c.Until)
	}
	s := &replaySource{table: t, relations: [][2]string{{rows, fits}}}
	archived, err := db.sharesArchive(ctx, t)
	if archived {
		own := "t.outbox = " + pg.QuoteLiteral(t.String())
		s.relations = append(s.relations, [2]string{db.own.archive, own})
	}
	processed := "t." + t.Column(outbox.ProcessedAt)
	s.where = processed + " IS NOT NULL AND " + MarkedSQL(t, "t") + sentSQL(t)
	if shard := t.ShardSQL("t"); shard != "" {
		s.where += " AND " + shard
	}
	s.and("t."+t.Column(outbox.ID)+" = ANY ({}::text[]::"+t.IDType+"[])", c.IDs, c.IDs != nil)
	s.and(s.text(outbox.EventType)+" = ANY ({}::text[])", c.EventTypes, c.EventTypes != nil)
	s.and(s.text(outbox.AggregateType)+" = {}::text", c.AggregateType, c.AggregateType != nil)
	s.and(s.text(outbox.AggregateID)+" = {}::text", c.AggregateID, c.AggregateID != nil)
	s.and(s.text(outbox.TenantID)+" = {}::text", c.TenantID, c.TenantID != nil)
	s.and(processed+" >= {}::timestamptz", c.Since, c.Since != nil)
	s.and(processed+" < {}::timestamptz", c.Until, c.Until != nil)
	return s, err
}

// markedOnceSQL is the marked rows of a table with a journal. One that several entries have, as after a
// crash, is there with the last of them, of those from before until.
func markedOnceSQL(t *outbox.Table, until *time.Time) string {
	and := " AND j.kind = 'stored'"
	if until != nil {
		and += " AND j.processed_at < " + pg.QuoteLiteral(until.Format(time.RFC3339Nano)) + "::timestamptz"
	}
	return journalSQL(t, `(WITH ranges AS (
			SELECT r, max(upper(r)) OVER (
				ORDER BY lower(r) ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
			FROM {entries} j, unnest(j.ids) r WHERE j.outbox = {outbox} AND j.kind = 'stored'
		), twice AS MATERIALIZED (
			SELECT coalesce(range_agg(int8range(lower(r), least(upper(r), before))), '{}') AS ids
			FROM ranges WHERE lower(r) < before
		), `) + journalSQL(t, marksSQL("(SELECT ids FROM twice)", and)) + `
		SELECT m.* FROM ` + sourceOf(t).marked + journalSQL(t, ` m
		WHERE NOT (SELECT ids FROM twice) @> m.{id}
			OR m.{processed} = (SELECT k.processed_at FROM marks k WHERE k.id = m.{id}))`)
}

// sharesArchive reports whether the archive can have rows of the outbox: it is there, its ids are of the same
// type, and it has the columns that become headers.
func (db *DB) sharesArchive(ctx context.Context, t *outbox.Table) (shares bool, err error) {
	if !IsArchived(t) {
		return false, nil
	}
	headers := t.Layout.Columns[outbox.FirstHeader : outbox.LastHeader+1]
	err = db.QueryRow(ctx, []any{&shares}, `SELECT coalesce((SELECT a.atttypid = o.atttypid
		FROM pg_attribute a, pg_attribute o
		WHERE a.attrelid = to_regclass($1) AND o.attrelid = to_regclass($2)
			AND a.attname = $3 AND o.attname = $3), false)
		AND NOT EXISTS (SELECT FROM unnest($4::text[]) h WHERE h <> '' AND NOT EXISTS (
			SELECT FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = h AND NOT attisdropped))`,
		db.own.archive, t.SQL(), t.Layout.Columns[outbox.ID], headers)
	return shares, err
}

// text is the field as text; a column that the layout lacks fits nothing.
func (s *replaySource) text(f outbox.Field) string {
	if !s.table.Layout.Has(f) {
		return "NULL"
	}
	return "concat(t." + s.table.Column(f) + ")"
}

// and adds a condition, in which {} is the argument.
func (s *replaySource) and(condition string, arg any, given bool) {
	if !given {
		return
	}
	s.args = append(s.args, arg)
	s.where += " AND " + strings.ReplaceAll(condition, "{}", fmt.Sprintf("$%d", len(s.args)))
}

// sql selects columns of t and n from both relations. n are the lengths of values, empty for none.
func (s *replaySource) sql(columns, lengths string) string {
	var parts []string
	for _, r := range s.relations {
		from := r[0] + " t"
		if lengths != "" {
			from += ", LATERAL (SELECT " + lengths + " OFFSET 0) n"
		}
		parts = append(parts,
			fmt.Sprintf("SELECT %s FROM %s WHERE %s AND %s", columns, from, r[1], s.where))
	}
	return strings.Join(parts, " UNION ALL ")
}

// TypeCount is how many rows of an event type there are.
type TypeCount struct {
	EventType string `json:"event_type"`
	Rows      int64  `json:"rows"`
}

// CountReplay counts the rows that a request would have published again, by type, the most frequent
// first, and at most limit rows of all types.
func (db *DB) CountReplay(
	ctx context.Context, t *outbox.Table, c ReplayChoice, limit int,
) (all []TypeCount, err error) {
	s, err := db.replaySource(ctx, t, c)
	if err == nil {
		sql := fmt.Sprintf(`SELECT x.kind, count(*) FROM (%s LIMIT %d) x GROUP BY 1 ORDER BY 2 DESC, 1`,
			s.sql(s.text(outbox.EventType)+" AS kind", ""), limit)
		err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			rows, _ := conn.Query(ctx, sql, s.args...)
			all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[TypeCount])
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("count delivered rows of %s: %w", t, db.explainReplays(err))
	}
	return all, nil
}

// ReplayRow is a delivered row.
type ReplayRow struct {
	*outbox.Event
	At         string // processed_at
	Unreadable error  // the server cannot send it; the event has its id alone

	buf []byte // holds the event's values
}

// mostKeptBuffer is the largest buffer of a row that is used again, in bytes.
const mostKeptBuffer = 16 << 10

// addRow copies a row into the next element of some, which may have held another one.
func addRow(some []ReplayRow, ev *outbox.Event, at string) []ReplayRow {
	if n := len(some); n < cap(some) {
		some = some[:n+1]
	} else {
		some = append(some, ReplayRow{})
	}
	row := &some[len(some)-1]
	if row.Event == nil {
		row.Event = &outbox.Event{}
	}
	if cap(row.buf) > mostKeptBuffer {
		row.buf = nil
	}
	row.buf = ev.CopyTo(row.Event, row.buf)
	row.At, row.Unreadable = at, nil
	return some
}

const (
	// replayBytes is how many bytes of rows are kept together.
	replayBytes = 1 << 20
	// replaySnapshot is how long one snapshot is read: it keeps VACUUM from removing rows.
	replaySnapshot     = 5 * time.Second
	replaySnapshotMost = 5 * time.Minute
)

// ReplayReader reads the delivered rows of an outbox in the order of processed_at and id. It reads table
// and archive in one snapshot for some seconds and then goes on behind the last row in a new one, so a
// row that moves to the archive is neither missed nor read twice. It belongs to one goroutine, and has
// its connection alone.
type ReplayReader struct {
	// Fetch is how many rows are asked for at once, 100 at first. What Read calls may change it.
	Fetch int

	db     *DB
	table  *outbox.Table
	source *replaySource
	sql    string
	fields []outbox.Field

	at, id string // of the last row
	open   bool   // a cursor is
	until  time.Time
	single bool // FETCH one row: some row cannot be read
	// portion is used again for each: rows are a kilobyte each, and tens of thousands in a second. As
	// garbage they would cost live events their latency.
	portion []ReplayRow
}

// OpenReplay connects and prepares to read the rows behind a cursor. The largest payload has mostPayload
// bytes; of one that is longer, the length alone is read.
func OpenReplay(
	ctx context.Context, cfg Config, t *outbox.Table, c ReplayChoice, from ReplayCursor, mostPayload int,
) (*ReplayReader, error) {
	db, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	r := &ReplayReader{Fetch: 100, db: db, table: t, at: from.At, id: from.ID}
	if err = db.Unbind(ctx); err == nil {
		// A snapshot is given up by the reader. A search for few rows among many has no limit.
		_, err = db.Conn().Exec(ctx, `SET idle_in_transaction_session_timeout = 0; SET statement_timeout = 0`)
	}
	if err == nil {
		r.source, err = db.replaySource(ctx, t, c)
	}
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("read delivered rows of %s: %w", t, err)
	}
	fields := fieldsOf(t)
	columns, lengths := valuesSQL(t, fields, mostPayload, lengthSQL)
	id, processed := "t."+t.Column(outbox.ID), "t."+t.Column(outbox.ProcessedAt)
	n := len(r.source.args)
	r.source.where += fmt.Sprintf(` AND ($%[1]d = '' OR %[3]s >= nullif($%[1]d, '')::timestamptz
		AND (%[3]s > nullif($%[1]d, '')::timestamptz OR %[4]s > nullif($%[2]d, '')::text::%[5]s))`,
		n+1, n+2, processed, id, t.IDType)
	columns += ", " + processed + " AS at, " + id + " AS id"
	r.sql, r.fields = r.source.sql(columns, lengths)+" ORDER BY at, id", fields
	return r, nil
}

// Close ends the connection.
func (r *ReplayReader) Close() { r.db.Close() }

// Read calls each with the rows, some at a time, until there are no more or each fails. What each gets is
// overwritten when it returns. Nothing is read ahead of it.
func (r *ReplayReader) Read(ctx context.Context, each func([]ReplayRow) error) error {
	for {
		done, err := r.next(ctx, each)
		switch {
		case err == nil && done:
			return nil
		case err == nil:
			continue
		case !isUnreadable(err) || !r.db.Alive():
			return r.explain(err)
		}
		if _, err := r.db.Conn().Exec(ctx, `ROLLBACK`); err != nil {
			return r.explain(err)
		}
		if r.open = false; r.single {
			err = r.skip(ctx, err, each)
		} else {
			err, r.single = nil, true
		}
		if err != nil {
			return err
		}
	}
}

func (r *ReplayReader) explain(err error) error {
	return fmt.Errorf("read delivered rows of %s: %w", r.table, r.db.explainReplays(err))
}

func (r *ReplayReader) next(ctx context.Context, each func([]ReplayRow) error) (done bool, err error) {
	if r.open && time.Now().After(r.until) {
		if err := r.end(ctx); err != nil {
			return false, err
		}
	}
	begun := time.Now()
	if !r.open {
		if err := r.declare(ctx); err != nil {
			return false, err
		}
	}
	n, first, err := r.fetch(ctx, each)
	if err != nil {
		return false, err
	}
	// Where many rows have one processed_at, each new cursor sorts all of them.
	r.until = maxTime(r.until, begun.Add(min(20*first.Sub(begun), replaySnapshotMost)))
	if n == 0 {
		return true, r.end(ctx)
	}
	return false, nil
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (r *ReplayReader) end(ctx context.Context) error {
	r.open = false
	_, err := r.db.Conn().Exec(ctx, `COMMIT`)
	return err
}

func (r *ReplayReader) declare(ctx context.Context) error {
	conn := r.db.Conn()
	if _, err := conn.Exec(ctx, `BEGIN READ ONLY`); err != nil {
		return err
	}
	args := append(append([]any{pgx.QueryExecModeExec}, r.source.args...), r.at, r.id)
	if _, err := conn.Exec(ctx, `DECLARE replay NO SCROLL CURSOR FOR `+r.sql, args...); err != nil {
		return err
	}
	r.open, r.until = true, time.Now().Add(replaySnapshot)
	return nil
}

// fetch returns how many rows it has read, and when it had the first one.
func (r *ReplayReader) fetch(
	ctx context.Context, each func([]ReplayRow) error,
) (n int, first time.Time, err error) {
	most := r.Fetch
	if r.single {
		most = 1
	}
	rows, err := r.db.Conn().Query(ctx, fmt.Sprintf(`FETCH %d FROM replay`, most),
		pgx.QueryExecModeExec, pgx.QueryResultFormats{pgx.TextFormatCode})
	if err != nil {
		return 0, first, err
	}
	defer rows.Close()
	r.portion = r.portion[:0] // of a fetch that has failed
	bytes := 0
	hand := func() error {
		some := r.portion
		if r.portion, bytes = some[:0], 0; len(some) == 0 {
			return nil
		}
		last := some[len(some)-1]
		r.at, r.id = last.At, string(last.Values[outbox.ID])
		return each(some)
	}
	for rows.Next() {
		if n++; n == 1 {
			first = time.Now()
		}
		v := rows.RawValues()
		ev := eventOf(r.table, r.fields, v)
		r.portion = addRow(r.portion, &ev, string(v[2*len(r.fields)]))
		if bytes += ev.Size(); bytes > replayBytes {
			if err := hand(); err != nil {
				return n, first, err
			}
		}
	}
	if err := rows.Err(); err != nil {
		return n, first, err
	}
	return n, first, hand()
}

// skip passes over the next row, which the server cannot send.
func (r *ReplayReader) skip(ctx context.Context, cause error, each func([]ReplayRow) error) error {
	t := r.table
	keys := r.source.sql("t."+t.Column(outbox.ProcessedAt)+" AS at, t."+t.Column(outbox.ID)+" AS id", "")
	args := append(append([]any{}, r.source.args...), r.at, r.id)
	var at, id string
	first := `SELECT concat(x.at), concat(x.id) FROM (` + keys + ` ORDER BY at, id LIMIT 1) x`
	err := r.db.Conn().QueryRow(ctx, first, args...).Scan(&at, &id)
	if err != nil {
		return r.explain(cause)
	}
	r.at, r.id, r.single = at, id, false
	ev := &outbox.Event{Table: t}
	ev.Values[outbox.ID] = []byte(id)
	return each([]ReplayRow{{Event: ev, At: at, Unreadable: cause}})
}
