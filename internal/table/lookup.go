package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// State is what the table says of a row that the WAL brings, or that was read
// back from the stream.
type State struct {
	// Exists: the table has a row with this id. Same: its content is the row's
	// own. The rest is said of the same row only.
	Exists, Same bool
	// Pending: not marked. Recorded: a failure or a hold is recorded in it.
	Pending, Recorded bool
	// Visible: the inserting transaction is visible; what is not there now was
	// there before.
	Visible bool
	// ProcessedAt is when it was marked; zero where it was not, or where the
	// layout does not say.
	ProcessedAt time.Time
}

// Publish reports whether a row from the WAL is to be published: the table holds
// that very row pending and unrecorded, or does not show it yet. Otherwise it is
// marked or gone, and settled, or recorded or changed, and the poller's.
func (s State) Publish() bool {
	if s.Exists && s.Same {
		return s.Pending && !s.Recorded
	}
	return !s.Visible
}

// LookUp reads the state of rows of one table. An id that the table's id type
// cannot hold is no row of it. A row whose content the server cannot render is another
// one by now: it has rendered that of the row which the caller knows.
func (db *DB) LookUp(ctx context.Context, t *outbox.Table, rows []Row) ([]State, error) {
	return db.LookUpValues(ctx, t, rows, nil)
}

// LookUpValues is LookUp. see, if set, is called with the values of each row whose content is the same,
// except its payload, and its place among rows. They are valid until it returns. It may be called again for a
// row.
func (db *DB) LookUpValues(
	ctx context.Context, t *outbox.Table, rows []Row, see func(n int, ev *outbox.Event),
) ([]State, error) {
	states := make([]State, 0, len(rows))
	err := portions[Row]{
		size: &db.portion, bytes: rowBytes,
		do: func(rows []Row) error {
			some, err := db.lookUp(ctx, t, rows, from(len(states), see))
			states = append(states, some...)
			return err
		},
		alone: func(row Row, err error) error {
			if err := db.explainRefusal(ctx, t, err); errors.Is(err, ErrTableChanged) {
				return err
			}
			exists, err := db.exists(ctx, t, row.Ref.ID)
			states = append(states, State{Exists: exists, Visible: true})
			return err
		},
	}.run(rows)
	if err != nil {
		return nil, err
	}
	return states, nil
}

// from is see for rows of which the first one has this place.
func from(first int, see func(n int, ev *outbox.Event)) func(n int, ev *outbox.Event) {
	if see == nil {
		return nil
	}
	return func(n int, ev *outbox.Event) { see(first+n, ev) }
}

// exists reports whether the table has a row with an id, whatever else is in it.
func (db *DB) exists(ctx context.Context, t *outbox.Table, id string) (exists bool, err error) {
	err = db.QueryRow(ctx, []any{&exists}, fmt.Sprintf(
		`SELECT EXISTS (SELECT FROM %s t WHERE t.%s = $1::text::%s)`,
		t.SQL(), t.Column(outbox.ID), t.IDType), id)
	if isUnreadable(err) {
		return false, nil // the id type cannot hold it
	}
	if err != nil {
		return false, fmt.Errorf("look for row %q of %s: %w", id, t, err)
	}
	return exists, nil
}

// lookUp reads the states in one snapshot.
func (db *DB) lookUp(
	ctx context.Context, t *outbox.Table, rows []Row, see func(n int, ev *outbox.Event),
) ([]State, error) {
	states := make([]State, len(rows))
	var fields []outbox.Field
	if see != nil {
		fields = attributesOf(t)
	}
	sql := lookUpSQL(t, fields)
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		args := db.args(rows).known()
		if Journals(t) {
			args = append(args, rangesOf(rows))
		}
		if see != nil {
			args = append([]any{pgx.QueryResultFormats{pgx.TextFormatCode}}, args...)
		}
		result, _ := conn.Query(ctx, sql, args...)
		var ord int
		var s State
		var marked *time.Time
		columns := []any{&ord, &s.Exists, &s.Same, &s.Pending, &s.Recorded, &s.Visible, &marked}
		_, err := pgx.ForEachRow(result, append(columns, make([]any, 2*len(fields))...), func() error {
			if states[ord-1].Same {
				return nil // the id is not unique, and the very row was seen
			}
			if s.Same && see != nil {
				ev := eventOf(t, fields, result.RawValues()[len(columns):])
				see(ord-1, &ev)
			}
			s.ProcessedAt = time.Time{}
			if marked != nil {
				s.ProcessedAt = *marked
			}
			states[ord-1] = s
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up rows of %s: %w", t, err)
	}
	return states, nil
}

// eventFieldsOf are the fields of a table that an event is made of.
func eventFieldsOf(t *outbox.Table) []outbox.Field {
	return slices.DeleteFunc(fieldsOf(t), func(f outbox.Field) bool { return f > outbox.LastHeader })
}

// attributesOf are those except the payload.
func attributesOf(t *outbox.Table) []outbox.Field {
	return slices.DeleteFunc(eventFieldsOf(t), func(f outbox.Field) bool { return f == outbox.Payload })
}

// attributesSQL are the values of fields as further columns, and what is to be joined for them.
func attributesSQL(t *outbox.Table, fields []outbox.Field) (values, join string) {
	if len(fields) == 0 {
		return "", ""
	}
	values, lengths := valuesSQL(t, fields, 0, lengthSQL)
	return ", " + values, "LEFT JOIN LATERAL (SELECT " + lengths + " OFFSET 0) n ON true"
}

// lookUpSQL has the values of fields behind the state.
func lookUpSQL(t *outbox.Table, fields []outbox.Field) string {
	values, lengths := attributesSQL(t, fields)
	recorded, processed := "false", "NULL::timestamptz"
	if is := recordedIs(t, "t"); is != recorded {
		recorded = "(" + is + ") IS TRUE"
	}
	if t.Layout.Has(outbox.ProcessedAt) {
		processed = "t." + t.Column(outbox.ProcessedAt)
	}
	same := fmt.Sprintf("(w.hash = %d OR %s = w.hash)", outbox.UnknownHash, t.HashSQL("t"))
	all := sourceOf(t).all(givenIDs)
	if Journals(t) { // ids that are no numbers are the ids of no row
		all = allSQL(t, "$4::int8multirange")
	}
	return strings.NewReplacer(
		"{byid}", byIDSQL(t, all, ""), "{id}", t.Column(outbox.ID), "{same}", same,
		"{pending}", PendingSQL(t, "t"), "{recorded}", recorded, "{processed}", processed,
		"{values}", values, "{lengths}", lengths,
	).Replace(`
SELECT w.ord::int, t.{id} IS NOT NULL,
	coalesce(t.{id} IS NOT NULL AND {same}, false), t.{id} IS NOT NULL AND {pending},
	t.{id} IS NOT NULL AND {recorded},
	w.xid IS NULL OR pg_visible_in_snapshot(w.xid::xid8, pg_current_snapshot()), {processed}{values}
FROM unnest($1::text[], $2::bigint[], $3::text[]) WITH ORDINALITY AS w(id, hash, xid, ord)
LEFT JOIN {byid} ON true {lengths}`)
}

// byIDSQL is the rows of a relation that have the id of w, to be joined as t. OFFSET 0 leaves the planner no
// choice but to look up each id. Without it the planner would read the whole table for each: statistics that
// were made while nothing was pending are still in force when a million rows are.
func byIDSQL(t *outbox.Table, relation, where string) string {
	return fmt.Sprintf("LATERAL (SELECT * FROM %s t WHERE %st.%s = w.id::%s OFFSET 0) t",
		relation, where, t.Column(outbox.ID), t.IDType)
}

// MarkCursor is where a walk over the marked rows stands; the zero one is its
// start.
type MarkCursor struct {
	at time.Time
	id string
}

// At is the time of the last mark.
func (c *MarkCursor) At() time.Time { return c.at }

// MarkedRow is a row with the time of its mark, which tells this mark from a later
// one of the same row.
type MarkedRow struct {
	outbox.Ref
	Marked time.Time
	// Archived is when it came to the archive; zero for one that is in its outbox.
	Archived time.Time
}

// MarkedSince lists rows that were marked at or after a time, the oldest mark
// first, at most limit of them from next on. It returns nothing where the layout
// does not say when a row was marked. A row whose content the server cannot render is
// left out, and so is one that is longer than any message: it is not what was stored.
func (db *DB) MarkedSince(
	ctx context.Context, t *outbox.Table, since time.Time, next *MarkCursor, limit int,
) ([]MarkedRow, error) {
	if !MarkOf(t).Stays() {
		return nil, nil
	}
	where := MarkedSQL(t, "t") + sentSQL(t)
	if fits := t.WhereSQL("t"); fits != "" {
		where += " AND " + fits
	}
	return db.markedSince(ctx, t, sourceOf(t), "NULL::timestamptz", where, since, next, limit)
}

// AsMarks makes of times what marks of a table that were made then are: a column may have no zone, or be
// rounded. A time that is not after another one does not become one that is.
func (db *DB) AsMarks(ctx context.Context, t *outbox.Table, times []time.Time) ([]time.Time, error) {
	typ, err := db.markType(ctx, t)
	if err != nil || typ == "" || len(times) == 0 {
		return times, err
	}
	var marks []time.Time
	err = db.QueryRow(ctx, []any{&marks}, `SELECT array_agg(at::`+typ+` ORDER BY n)
		FROM unnest($1::timestamptz[]) WITH ORDINALITY x (at, n)`, times)
	return marks, err
}

// markType is the type of a table's marks, "" where they are as PostgreSQL's clock has them.
func (db *DB) markType(ctx context.Context, t *outbox.Table) (typ string, err error) {
	if !MarkOf(t).Stays() || Journals(t) {
		return "", nil
	}
	err = db.QueryRow(ctx, []any{&typ}, `SELECT CASE format_type(atttypid, atttypmod)
			WHEN 'timestamp with time zone' THEN '' ELSE format_type(atttypid, atttypmod) END
		FROM pg_attribute WHERE attrelid = $1::regclass AND attname = $2`,
		t.SQL(), t.Layout.Columns[outbox.ProcessedAt])
	return typ, err
}

// sentSQL leaves out the rows that were not to be sent.
func sentSQL(t *outbox.Table) string {
	if !t.Layout.Has(outbox.LastError) {
		return ""
	}
	return fmt.Sprintf(" AND (t.%s LIKE '%s%%') IS NOT TRUE", t.Column(outbox.LastError), Skipped)
}

// markedPage is how many rows one statement reads where some may be other shards'.
const markedPage = 5000

// markedListSQL lists $3 marked rows: the id, the mark and more of each, from the time $1 and the id $2 on,
// up to the time $4 where they come by pages.
func markedListSQL(t *outbox.Table, from source, more, where string) string {
	id, processed := "t."+t.Column(outbox.ID), "t."+t.Column(outbox.ProcessedAt)
	if from.page != "" {
		where += " AND " + processed + " <= coalesce($4::timestamptz, 'infinity')"
	}
	return fmt.Sprintf(`SELECT concat(%[1]s), %[2]s%[6]s FROM %[3]s t WHERE %[5]s AND %[2]s >= $1
			AND (%[2]s > $1 OR $2 = '' OR %[1]s > nullif($2, '')::text::%[4]s)
		ORDER BY %[2]s, %[1]s LIMIT $3`, id, processed, from.marked, t.IDType, where, more)
}

// markedSince passes over other shards' rows here and not in a statement: there may be
// more of them between two of this one's than a statement has time for.
func (db *DB) markedSince(
	ctx context.Context, t *outbox.Table, from source, moved, where string,
	since time.Time, next *MarkCursor, limit int,
) (rows []MarkedRow, err error) {
	page, own := limit, "true"
	if !t.Shard.All() {
		page, own = markedPage, t.ShardSQL("t")
	}
	list := func(more string) string { return markedListSQL(t, from, more, where) }
	sql, pass := list(fmt.Sprintf(", %s, %s, %s", t.HashSQL("t"), moved, own)), list("")
	all := page
	most := all // 1 where the next row may be one that cannot be rendered
	for read := page; err == nil && read == page && len(rows) < limit; {
		page = min(most, db.portion.most())
		start := *next
		if start.at.IsZero() {
			start = MarkCursor{at: since}
		}
		args := []any{start.at, start.id, page}
		var last *time.Time
		if from.page != "" {
			if err = db.QueryRow(ctx, []any{&last}, from.page, start.at, page); err != nil {
				break
			}
			args = append(args, last)
		}
		read = 0
		err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			result, _ := conn.Query(ctx, sql, args...)
			row := MarkedRow{Ref: outbox.Ref{Table: t}}
			var hash *int64
			var archived *time.Time
			var own bool
			columns := []any{&row.ID, &row.Marked, &hash, &archived, &own}
			_, err := pgx.ForEachRow(result, columns, func() error {
				read++
				if len(rows) == limit {
					return nil
				}
				next.id, next.at = row.ID, row.Marked
				if hash == nil {
					return nil
				}
				row.Hash = uint64(*hash)
				if archived != nil {
					row.Archived = *archived
				}
				if own {
					rows = append(rows, row)
				}
				return nil
			})
			return err
		})
		switch { // what was read before it ended counts
		case TooLong(err) && page > 1:
			db.portion.rows.Store(int64(page / 2))
			read, err = page, nil
		case isUnreadable(err) && page > 1:
			most, read, err = 1, page, nil
		case isUnreadable(err):
			args[2] = 1
			err, read = db.QueryRow(ctx, []any{&next.id, &next.at}, pass, args...), page
			if errors.Is(err, pgx.ErrNoRows) { // it is gone
				err = nil
			}
		case err == nil && read < page && last != nil && len(rows) < limit:
			*next, read = MarkCursor{at: last.Add(time.Microsecond)}, page
			fallthrough
		default:
			most = all
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read marked rows of %s: %w", t, err)
	}
	return rows, nil
}

// Unmark makes rows pending again that are marked and were lost, as held ones
// where the layout allows it: until they are delivered, the later rows of their
// aggregates wait. One that carries another mark by now has been delivered again,
// and stays. It returns those that it has made pending, at an error those before it, and
// those that somebody has locked, which it leaves as they are.
func (db *DB) Unmark(
	ctx context.Context, t *outbox.Table, rows []MarkedRow,
) (pending, locked []MarkedRow, err error) {
	sql := unmarkSQL(t)
	err = portions[MarkedRow]{size: &db.portion, do: func(some []MarkedRow) error {
		ids, hashes, marks := markArgs(some)
		var done, left []MarkedRow
		err := db.moving(ctx, t, func(ctx context.Context, q queryer) error {
			result, _ := q.Query(ctx, sql, ids, hashes, marks)
			var number int
			var isLocked bool
			_, err := pgx.ForEachRow(result, []any{&number, &isLocked}, func() error {
				if isLocked {
					left = append(left, some[number-1])
				} else {
					done = append(done, some[number-1])
				}
				return nil
			})
			return err
		})
		if err == nil { // a statement may be cancelled after its last row
			pending, locked = append(pending, done...), append(locked, left...)
		}
		return err
	}}.run(rows)
	if err != nil {
		return pending, nil, fmt.Errorf("make rows of %s pending again: %w", t, err)
	}
	return pending, locked, nil
}

func unmarkSQL(t *outbox.Table) string {
	// IS TRUE: the rows are to be found by their ids, whatever index answers to the marks.
	same := fmt.Sprintf("(t.%s = w.mark) IS TRUE AND %s", t.Column(outbox.ProcessedAt), storedSQL(t))
	return MarkOf(t).unmarkSQL(t, same)
}

// unmarkSQL implements Mark.
func (inRow) unmarkSQL(t *outbox.Table, same string) string {
	return strings.NewReplacer(
		"{table}", t.SQL(), "{byid}", byIDSQL(t, t.SQL(), ""), "{set}", pendingSets(t, lostNote).sql(),
		"{id}", t.Column(outbox.ID),
		"{same}", same, "{free}", FreeSQL(t), "{own}", pg.OwnPath,
	).Replace(`
WITH lost AS MATERIALIZED (
	SELECT w.ord, t.{id} AS id, w.hash, w.mark
	FROM unnest($1::text[], $2::bigint[], $3::timestamptz[]) WITH ORDINALITY AS w(id, hash, mark, ord)
	JOIN {byid} ON {same}
), free AS MATERIALIZED (
	SELECT w.ord, w.id, t.place, t.at FROM (SELECT * FROM lost ORDER BY id) w,
		LATERAL (SELECT t.tableoid AS place, t.ctid AS at FROM {table} t
			WHERE t.{id} = w.id AND {same} FOR UPDATE SKIP LOCKED) t
), done AS (UPDATE {table} t SET {set} WHERE {free} RETURNING t.{id} AS id)
SELECT ord::int, ord NOT IN (SELECT f.ord FROM free f WHERE (f.id IN (SELECT id FROM done)) IS TRUE)
FROM lost WHERE {own} ORDER BY ord`)
}

func markArgs(rows []MarkedRow) (ids []string, hashes []int64, marks []time.Time) {
	for _, r := range rows {
		ids, hashes, marks = append(ids, r.ID), append(hashes, int64(r.Hash)), append(marks, r.Marked)
	}
	return ids, hashes, marks
}

// HasMarks reports whether any row of the table is marked, or was and is in the
// archive now. An archive that holds something and may not be read counts as rows
// of every table.
func (db *DB) HasMarks(ctx context.Context, t *outbox.Table) (bool, error) {
	has, err := db.hasMarkedRows(ctx, t)
	if err != nil || has || !MarkOf(t).Stays() {
		return has, err
	}
	if has, err = db.hasArchived(ctx, t); err != nil {
		return false, fmt.Errorf("look for archived rows of %s: %w", t, err)
	}
	return has, nil
}

// hasMarkedRows reports whether any row that is in the table is marked.
func (db *DB) hasMarkedRows(ctx context.Context, t *outbox.Table) (has bool, err error) {
	s := sourceOf(t)
	if !Keeps(t) && !MarkOf(t).Stays() {
		return false, nil
	}
	if !t.Shard.All() && MarkOf(t).Stays() {
		var start MarkCursor
		rows, err := db.markedSince(ctx, t, s, "NULL::timestamptz", "true", time.Time{}, &start, 1)
		return len(rows) > 0, err
	}
	err = db.QueryRow(ctx, []any{&has}, fmt.Sprintf(
		`SELECT EXISTS (SELECT FROM %s t WHERE %s%s)`, s.marked, MarkedSQL(t, "t"), FilterSQL(t, "t")))
	if err != nil {
		return false, fmt.Errorf("look for marked rows of %s: %w", t, err)
	}
	return has, nil
}

// hasArchived needs no privilege to learn whether there is an archive, and whether
// a partition of it has any page.
func (db *DB) hasArchived(ctx context.Context, t *outbox.Table) (has bool, err error) {
	var readable bool
	err = db.QueryRow(ctx, []any{&readable, &has}, `SELECT
		coalesce(has_table_privilege(to_regclass($1), 'SELECT'), false),
		coalesce((SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree(to_regclass($1))) > 0, false)`,
		db.own.archive)
	if err != nil || !readable || !has {
		return has, err
	}
	if IsArchived(t) && !t.Shard.All() {
		rows, err := db.ArchivedSince(ctx, t, time.Time{}, &MarkCursor{}, 1)
		return len(rows) > 0, err
	}
	exists := `SELECT EXISTS (SELECT FROM ` + db.own.archive + ` t WHERE t.outbox = $1)`
	err = db.QueryRow(ctx, []any{&has}, exists, t.String())
	return has, err
}

// Unlocked is what Blocker says of a row that nobody has locked.
const Unlocked = "nobody: it is not locked, a trigger of its table keeps it from being changed"

// Blocker describes the session that holds a lock on a row, or "" where it
// cannot be told.
func (db *DB) Blocker(ctx context.Context, t *outbox.Table, id string) (string, error) {
	from, row := t.SQL(), fmt.Sprintf("t.%s = $1::text::%s", t.Column(outbox.ID), t.IDType)
	if Journals(t) { // what is locked is the deferral
		from, row = t.Journal.Deferred, journalSQL(t, "t.outbox = {outbox} AND t.id = $1::text::bigint")
	}
	sql := fmt.Sprintf(`WITH free AS MATERIALIZED (SELECT FROM %[1]s t WHERE %[2]s FOR UPDATE SKIP LOCKED)
		SELECT * FROM (SELECT %[4]s FROM %[1]s t
		JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = t.xmax
		JOIN pg_stat_activity a USING (pid)
		WHERE %[2]s AND a.pid <> pg_backend_pid() LIMIT 1) a
		UNION ALL SELECT '%[3]s' FROM free LIMIT 1`, from, row, Unlocked, pg.DescribeSession("a"))
	var who string
	err := db.QueryRow(ctx, []any{&who}, sql, id)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("look for the lock's holder: %w", err)
	}
	return who, nil
}

// OldestPending is how long the oldest row that is due and not processed has been due; zero where there is
// none or the layout does not say. A row that has no due time is due since occurred_at: of these it is the
// oldest of the first 1,000. Of a table with a journal it is the oldest among the first rows.
func (db *DB) OldestPending(ctx context.Context, t *outbox.Table) (time.Duration, error) {
	if !t.Layout.Has(outbox.AvailableAt) && !t.Layout.Has(outbox.OccurredAt) {
		return 0, nil
	}
	var seconds float64
	err := db.QueryRow(ctx, []any{&seconds}, oldestSQL(t, db.own.deadLetters))
	if err != nil {
		return 0, fmt.Errorf("read lag of %s: %w", t, err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// oldestSQL has a search for each of the freshHalves: an index on available_at has the order of both.
func oldestSQL(t *outbox.Table, letters string) string {
	available, occurred := "t."+t.Column(outbox.AvailableAt), "t."+t.Column(outbox.OccurredAt)
	search := func(since, where, order string) string {
		return fmt.Sprintf("(SELECT %s AS since FROM %s t WHERE %s AND %s AND %s ORDER BY %s)",
			since, sourceOf(t).due, PendingSQL(t, "t"), unkeptSQL(t, letters), where, order)
	}
	var searches []string
	switch {
	case !t.Layout.Has(outbox.AvailableAt):
		searches = append(searches, search(occurred, "true", occurred+" LIMIT 1"))
	default:
		searches = append(searches, search(available, available+" <= now()", available+" LIMIT 1"))
		if t.Layout.Has(outbox.OccurredAt) {
			searches = append(searches,
				search(occurred, available+" IS NULL", available+", t."+t.Column(outbox.ID)+" LIMIT 1000"))
		}
	}
	const age = "now() - greatest(x.since, now() - interval '10 years')"
	return "SELECT coalesce(extract(epoch FROM max(" + age + ")), 0)::float8 FROM (" +
		strings.Join(searches, " UNION ALL ") + ") x WHERE x.since <= now()"
}
