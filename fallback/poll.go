package fallback

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Held begins the last_error of a row that waits behind a failed row of its
// aggregate. No failure begins so.
const Held = "held: "

const (
	heldNote    = Held + "an earlier row of its aggregate has failed"
	retriedNote = Held + "a dead letter that is tried again"
	lostNote    = Held + "the stream had lost it"
)

// IsHeld reports whether a row's last_error says that it is held.
func IsHeld(lastError []byte) bool { return strings.HasPrefix(string(lastError), Held) }

// Candidate is a pending row that the poller may have to deliver.
type Candidate struct {
	ID        string
	Aggregate string // see outbox.AggregateKey
	Recorded  bool   // parked or held
	Scheduled bool   // a row without a record that was meant for later
	Early     bool   // a row without a record that falls due within the threshold
	Attempts  int
	Bytes     int // of its payload, as the table keeps it
}

// Fresh lists rows that are pending, due and not recorded, in the order of their
// ids: the first limit of them, from one snapshot. An earlier row of the same
// aggregate was visible in that snapshot too.
//
// threshold tells rows that were meant for later, by their own columns. Rows that
// were not, but fall due within it, are listed too: later ones must not pass them.
func (db *DB) Fresh(ctx context.Context, t *outbox.Table, threshold time.Duration, limit int) ([]Candidate, error) {
	if t.Layout.Has(outbox.AvailableAt) {
		// As a rule few rows are due, and a great many may be scheduled for later.
		cs, err := db.candidates(ctx, t, freshSQL(t, threshold, "t."+t.Column(outbox.AvailableAt)+", "), limit+1)
		if err != nil || len(cs) <= limit {
			return cs, err
		}
	}
	return db.candidates(ctx, t, freshSQL(t, threshold, ""), limit)
}

func freshSQL(t *outbox.Table, threshold time.Duration, order string) string {
	early := "false"
	if t.Layout.Has(outbox.AvailableAt) {
		early = "(t." + t.Column(outbox.AvailableAt) + " > now()) IS TRUE"
	}
	return fmt.Sprintf(`SELECT x.* FROM (SELECT t.%[1]s AS id, %[2]s, false, %[3]s, 0, %[7]s, %[8]s FROM %[4]s t WHERE %[5]s ORDER BY %[6]st.%[1]s LIMIT $1) x ORDER BY x.id`,
		t.Column(outbox.ID), aggregateSQL(t), scheduledSQL(t, threshold), t.SQL(), freshWhere(t, threshold), order, early, bytesSQL(t))
}

// bytesSQL does not read the value: it may be kept out of line, and compressed.
func bytesSQL(t *outbox.Table) string {
	if !t.Layout.Has(outbox.Payload) {
		return "0"
	}
	return "coalesce(pg_column_size(t." + t.Column(outbox.Payload) + "), 0)"
}

func scheduledSQL(t *outbox.Table, threshold time.Duration) string {
	if !t.Layout.Has(outbox.AvailableAt) || !t.Layout.Has(outbox.OccurredAt) {
		return "false"
	}
	return fmt.Sprintf("t.%s > t.%s + %d * interval '1 microsecond'", t.Column(outbox.AvailableAt), t.Column(outbox.OccurredAt), threshold.Microseconds())
}

// freshWhere is the condition under which a row is pending and not recorded, and
// due, or early.
func freshWhere(t *outbox.Table, threshold time.Duration) string {
	where := pendingSQL(t, "t")
	if t.Layout.Has(outbox.LastError) {
		where += " AND t." + t.Column(outbox.LastError) + " IS NULL"
	}
	if t.Layout.Has(outbox.AvailableAt) {
		at := "t." + t.Column(outbox.AvailableAt)
		due := fmt.Sprintf("%s <= now() + %d * interval '1 microsecond'", at, threshold.Microseconds())
		if t.DueNullable { // no index answers to that
			due = "(" + due + ") IS NOT FALSE"
		}
		where += fmt.Sprintf(" AND %s AND ((%s > now()) IS NOT TRUE OR (%s) IS NOT TRUE)", due, at, scheduledSQL(t, threshold))
	}
	return where
}

// Recorded lists the recorded rows that may be tried now, in the order of their
// ids, at most limit: parked ones whose time has come, and held ones. With hold,
// each of them only when every earlier recorded row of its aggregate may, too.
func (db *DB) Recorded(ctx context.Context, t *outbox.Table, hold bool, limit int) ([]Candidate, error) {
	if !t.Layout.Records() {
		return nil, nil
	}
	ready := fmt.Sprintf("(t.%s LIKE '%s%%' OR (t.%s <= now()) IS NOT FALSE)", t.Column(outbox.LastError), Held, t.Column(outbox.AvailableAt))
	if by := partitionSQL(t); hold && by != "" {
		ready = fmt.Sprintf("CASE WHEN t.%s IS NULL THEN %s ELSE bool_and(%[2]s) OVER (PARTITION BY %s ORDER BY t.%s) END",
			t.Column(outbox.AggregateID), ready, by, t.Column(outbox.ID))
	}
	return db.candidates(ctx, t, fmt.Sprintf(`SELECT id, tenant, kind, aggregate, true, false, attempts, false, bytes
		FROM (SELECT t.%s AS id, %s, coalesce(t.%s, 0) AS attempts, %s AS ready, %s AS bytes FROM %s t WHERE %s) x WHERE ready ORDER BY x.id LIMIT $1`,
		t.Column(outbox.ID), aggregateSQL(t), t.Column(outbox.Attempts), ready, bytesSQL(t), t.SQL(), recordedSQL(t)), limit)
}

// Overtaken lists the keys of the aggregates in which a row without a record is
// pending and due, and a later one is recorded: a session could not finish with the
// former, and had recorded the latter.
func (db *DB) Overtaken(ctx context.Context, t *outbox.Table, threshold time.Duration) (map[string]bool, error) {
	if !t.Layout.Records() || !t.Layout.Has(outbox.AggregateID) {
		return nil, nil
	}
	keys := map[string]bool{}
	err := db.raw(ctx, overtakenSQL(t, threshold), nil, func(v [][]byte) error {
		keys[outbox.AggregateKey(v[0], v[1], v[2])] = true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for overtaken rows of %s: %w", t, err)
	}
	return keys, nil
}

// overtakenSQL reads the pending rows once. A join of the two kinds would compare
// each with each: statistics of a queue say that few rows are pending.
func overtakenSQL(t *outbox.Table, threshold time.Duration) string {
	recorded := pendingSQL(t, "r") + " AND r." + t.Column(outbox.LastError) + " IS NOT NULL"
	return strings.NewReplacer("{key}", aggregateSQL(t), "{table}", t.SQL(), "{fresh}", freshWhere(t, threshold), "{recorded}", recorded, "{pending}", pendingSQL(t, "t"),
		"{id}", t.Column(outbox.ID), "{aggregate}", t.Column(outbox.AggregateID), "{error}", t.Column(outbox.LastError), "{by}", partitionSQL(t)).Replace(`
SELECT DISTINCT tenant, kind, aggregate FROM (
	SELECT {key}, t.{error} IS NOT NULL AS recorded, bool_or(t.{error} IS NULL) OVER (PARTITION BY {by} ORDER BY t.{id}) AS behind
	FROM {table} t
	WHERE {pending} AND t.{aggregate} IS NOT NULL AND t.{id} <= (SELECT r.{id} FROM {table} r WHERE {recorded} ORDER BY r.{id} DESC LIMIT 1)
		AND (t.{error} IS NOT NULL OR ({fresh}))
) x WHERE recorded AND behind`)
}

// candidates runs a query for id, tenant, kind and id of the aggregate, recorded,
// scheduled, attempts, early, bytes.
func (db *DB) candidates(ctx context.Context, t *outbox.Table, sql string, args ...any) (cs []Candidate, err error) {
	keys := map[string]string{} // rows of one aggregate share its key: a pass may keep them for long
	err = db.raw(ctx, sql, args, func(v [][]byte) error {
		attempts, _ := strconv.Atoi(string(v[6]))
		bytes, _ := strconv.Atoi(string(v[8]))
		key := outbox.AggregateKey(v[1], v[2], v[3])
		if _, found := keys[key]; !found {
			keys[key] = key
		}
		cs = append(cs, Candidate{
			Attempts: attempts, Early: string(v[7]) == "t", Bytes: bytes,
			ID: string(v[0]), Aggregate: keys[key], Recorded: string(v[4]) == "t", Scheduled: string(v[5]) == "t",
		})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for pending rows of %s: %w", t, err)
	}
	return cs, nil
}

// Aggregates lists the keys of the aggregates that have a recorded row pending; ""
// stands for all rows that belong to none.
func (db *DB) Aggregates(ctx context.Context, t *outbox.Table) (keys []string, err error) {
	if !t.Layout.Records() {
		return nil, nil
	}
	sql := fmt.Sprintf(`SELECT DISTINCT %s FROM %s t WHERE %s`, aggregateSQL(t), t.SQL(), recordedSQL(t))
	err = db.raw(ctx, sql, nil, func(v [][]byte) error {
		keys = append(keys, outbox.AggregateKey(v[0], v[1], v[2]))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for recorded rows of %s: %w", t, err)
	}
	return keys, nil
}

// fetchBytes is how much of the rows' values Fetch keeps.
const fetchBytes = 8 << 20

// Fetch reads rows that are still pending, in the order of their ids. Rows that
// somebody has locked are left out, and so are those that are gone or marked. No
// lock stays when it returns. Where the rows turn out to be large it returns the
// first of them only, at least one, and says that there are more.
func (db *DB) Fetch(ctx context.Context, t *outbox.Table, ids []string) (rows []*outbox.Event, more bool, err error) {
	var columns []string
	var fields []outbox.Field
	for f := outbox.ID; f < outbox.NumFields; f++ {
		if t.Layout.Has(f) {
			columns, fields = append(columns, "t."+t.Column(f)), append(fields, f)
		}
	}
	sql := fmt.Sprintf(`SELECT %s FROM %s t WHERE t.%s = ANY ($1::text[]::%s[]) AND %s ORDER BY t.%[3]s FOR UPDATE SKIP LOCKED`,
		strings.Join(columns, ", "), t.SQL(), t.Column(outbox.ID), t.IDType, unmarkedSQL(t, "t"))
	size := 0
	err = db.raw(ctx, sql, []any{ids}, func(v [][]byte) error {
		ev := outbox.Event{Table: t}
		for i, f := range fields {
			ev.Values[f] = v[i]
		}
		if size += ev.Size(); more || size > fetchBytes && len(rows) > 0 {
			more = true
			return nil
		}
		rows = append(rows, ev.Clone())
		return nil
	})
	if err != nil {
		return nil, false, fmt.Errorf("read pending rows of %s: %w", t, err)
	}
	return rows, more, nil
}

// StillPending tells which of the rows are pending: of rows that Fetch left out,
// those that somebody has locked.
func (db *DB) StillPending(ctx context.Context, t *outbox.Table, ids []string) (pending []string, err error) {
	sql := fmt.Sprintf(`SELECT t.%s FROM %s t WHERE t.%[1]s = ANY ($1::text[]::%[3]s[]) AND %[4]s`,
		t.Column(outbox.ID), t.SQL(), t.IDType, unmarkedSQL(t, "t"))
	err = db.raw(ctx, sql, []any{ids}, func(v [][]byte) error {
		pending = append(pending, string(v[0]))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for locked rows of %s: %w", t, err)
	}
	return pending, nil
}

// NextDue is how long it takes until the next row that is scheduled falls due; ok
// is false where none is.
func (db *DB) NextDue(ctx context.Context, t *outbox.Table) (wait time.Duration, ok bool, err error) {
	if !t.Layout.Has(outbox.AvailableAt) {
		return 0, false, nil
	}
	sql := fmt.Sprintf(`SELECT extract(epoch FROM least(t.%s, now() + interval '1 day') - clock_timestamp())::float8 FROM %s t WHERE %s AND t.%[1]s > now()
		ORDER BY t.%[1]s LIMIT 1`, t.Column(outbox.AvailableAt), t.SQL(), pendingSQL(t, "t"))
	var seconds float64
	err = db.row(ctx, []any{&seconds}, sql)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("look for the next due row of %s: %w", t, err)
	}
	return max(time.Duration(seconds*float64(time.Second)), 0), true, nil
}

// FreshBefore reports whether a row that is pending, due and not recorded was
// written by a transaction with an id below xid, or may yet be: a transaction that
// is flushed is not visible before it has ended, which a synchronous standby may
// put off.
func (db *DB) FreshBefore(ctx context.Context, t *outbox.Table, threshold time.Duration, xid int64) (has bool, err error) {
	sql := fmt.Sprintf(`SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint < $1 OR EXISTS (SELECT FROM %s t WHERE %s AND age(t.xmin) > pg_snapshot_xmax(pg_current_snapshot())::text::bigint - $1)`,
		t.SQL(), freshWhere(t, threshold))
	if err := db.row(ctx, []any{&has}, sql, xid); err != nil {
		return false, fmt.Errorf("look for older rows of %s: %w", t, err)
	}
	return has, nil
}

// Flush has the server flush its WAL up to what was written when it is called:
// transactions are visible before, with synchronous_commit off, and a crash would
// take them back. The walsender sends only what is flushed, too.
func (db *DB) Flush(ctx context.Context) error {
	err := db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SELECT set_config('synchronous_commit', 'local', true), pg_logical_emit_message(true, 'walpost', '')
			WHERE pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()`)
		return err
	})
	if err != nil {
		return fmt.Errorf("flush the WAL: %w", err)
	}
	return nil
}

// raw runs a query and hands on each row's text, as the types' output functions
// render it and as the WAL has it. It is valid until each returns.
func (db *DB) raw(ctx context.Context, sql string, args []any, each func([][]byte) error) error {
	return db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, sql, append([]any{pgx.QueryResultFormats{pgx.TextFormatCode}}, args...)...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			if err := each(rows.RawValues()); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}

// recordedSQL is the condition under which a row is parked or held.
func recordedSQL(t *outbox.Table) string {
	return pendingSQL(t, "t") + " AND t." + t.Column(outbox.LastError) + " IS NOT NULL"
}

var aggregateFields = []outbox.Field{outbox.TenantID, outbox.AggregateType, outbox.AggregateID}

// aggregateSQL selects the columns that make an aggregate's key.
func aggregateSQL(t *outbox.Table) string {
	names := []string{"tenant", "kind", "aggregate"}
	for i, f := range aggregateFields {
		column := "NULL"
		if t.Layout.Has(f) {
			column = "t." + t.Column(f)
		}
		names[i] = column + " AS " + names[i]
	}
	return strings.Join(names, ", ")
}

// partitionSQL lists the columns that tell aggregates apart; "" where the layout
// knows none.
func partitionSQL(t *outbox.Table) string {
	if !t.Layout.Has(outbox.AggregateID) {
		return ""
	}
	var columns []string
	for _, f := range aggregateFields {
		if t.Layout.Has(f) {
			columns = append(columns, "t."+t.Column(f))
		}
	}
	return strings.Join(columns, ", ")
}
