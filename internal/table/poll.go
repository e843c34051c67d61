package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/outbox"
)

const (
	heldNote = Held + "an earlier row of its aggregate has failed"
	lostNote = Held + "the stream had lost it"
)

// Candidate is a pending row that the poller may have to deliver.
type Candidate struct {
	ID        string
	Aggregate outbox.AggregateKey
	Recorded  bool // parked or held
	Scheduled bool // a row without a record that was meant for later
	Early     bool // a row without a record that falls due within the threshold
	Attempts  int
	Bytes     int // of its payload, as the table keeps it
}

// Fresh lists rows that are pending, due, not recorded and not kept, in the order of their
// ids: the first limit of them, from one snapshot. An earlier row of the same
// aggregate was visible in that snapshot too.
//
// threshold tells rows that were meant for later, by their own columns. Rows that
// were not, but fall due within it, are listed too: later ones must not pass them.
func (db *DB) Fresh(
	ctx context.Context, t *outbox.Table, threshold time.Duration, limit int,
) ([]Candidate, error) {
	if t.Layout.Has(outbox.AvailableAt) && Changes(t) {
		// As a rule few rows are due, and a great many may be scheduled for later.
		cs, err := db.candidates(ctx, t, freshByDueSQL(t, threshold, db.own.deadLetters), limit+1)
		if err != nil || len(cs) <= limit {
			return cs, err
		}
	}
	sql := freshSQL(t, threshold, anyHalf(t, threshold), orderSQL(t, "t"), db.own.deadLetters)
	return db.candidates(ctx, t, sql, limit)
}

// freshByDueSQL searches by available_at, which is NULL in a row that is due at once. Each half
// has the order of the index on that column.
func freshByDueSQL(t *outbox.Table, threshold time.Duration, letters string) string {
	order := "t." + t.Column(outbox.AvailableAt) + ", t." + t.Column(outbox.ID)
	var halves []string
	for _, half := range freshHalves(t, threshold) {
		halves = append(halves, "("+freshSQL(t, threshold, half, order, letters)+")")
	}
	return "SELECT x.* FROM (" + strings.Join(halves, " UNION ALL ") + ") x ORDER BY " + listedSQL(t)
}

// freshHalves are conditions: of the rows that have a due time and are due, or early, and of those
// that have none. An index answers to each, and not to both in one.
func freshHalves(t *outbox.Table, threshold time.Duration) []string {
	if !t.Layout.Has(outbox.AvailableAt) {
		return []string{"true"}
	}
	at := "t." + t.Column(outbox.AvailableAt)
	dueSoon := fmt.Sprintf("%s <= now() + %d * interval '1 microsecond'", at, threshold.Microseconds())
	return []string{dueSoon, at + " IS NULL"}
}

func freshSQL(t *outbox.Table, threshold time.Duration, due, order, letters string) string {
	early := "false"
	if t.Layout.Has(outbox.AvailableAt) {
		early = "(t." + t.Column(outbox.AvailableAt) + " > now()) IS TRUE"
	}
	var all []string
	for _, s := range sourceOf(t).first {
		all = append(all, fmt.Sprintf(`(SELECT x.* FROM %sLATERAL (SELECT t.%s AS id, %s, false AS recorded,
				%s AS scheduled, 0 AS attempts, %s AS early, %s AS bytes, %s AS at
			FROM %s t WHERE %s AND %s ORDER BY %s LIMIT $1) x ORDER BY %s LIMIT $1)`,
			s.over, t.Column(outbox.ID), nameSQL(t), scheduledSQL(t, threshold), early, bytesSQL(t),
			atSQL(t, "t"), s.pending, freshWhere(t, threshold, due), unkeptSQL(t, letters), order,
			listedSQL(t)))
	}
	return "SELECT x.* FROM (" + strings.Join(all, " UNION ALL ") + ") x ORDER BY " + listedSQL(t) +
		" LIMIT $1"
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
	// Beyond the years that a timestamp has, the sum would be an error.
	return fmt.Sprintf("CASE WHEN t.%[2]s < '294000-01-01' "+
		"THEN t.%[1]s > t.%[2]s + %[3]d * interval '1 microsecond' ELSE false END",
		t.Column(outbox.AvailableAt), t.Column(outbox.OccurredAt), threshold.Microseconds())
}

// anyHalf is the condition under which a row is in one of the halves.
func anyHalf(t *outbox.Table, threshold time.Duration) string {
	return "(" + strings.Join(freshHalves(t, threshold), " OR ") + ")"
}

// freshWhere is the condition under which a row is pending and not recorded, and
// due, or early: see freshHalves.
func freshWhere(t *outbox.Table, threshold time.Duration, due string) string {
	return PendingSQL(t, "t") + " AND " + freshIs(t, threshold, due)
}

// freshIs is freshWhere of a pending row.
func freshIs(t *outbox.Table, threshold time.Duration, due string) string {
	is := unrecordedIs(t, "t")
	if t.Layout.Has(outbox.AvailableAt) {
		at := "t." + t.Column(outbox.AvailableAt)
		is += fmt.Sprintf(" AND %s AND ((%s > now()) IS NOT TRUE OR (%s) IS NOT TRUE)",
			due, at, scheduledSQL(t, threshold))
	}
	return is
}

// Recorded lists the recorded rows that may be tried now, at most limit: parked
// ones whose time has come, and held ones. With hold, each of them only when every
// earlier recorded row of its aggregate may, too. They come in the order of their
// ids, or, where the search is divided, each aggregate's in that order.
func (db *DB) Recorded(ctx context.Context, t *outbox.Table, hold bool, limit int) ([]Candidate, error) {
	if !t.Layout.Records() {
		return nil, nil
	}
	var all []Candidate
	err := db.recordedParts.of(t).run(recordedHash(t), func(where string) (bool, error) {
		sql := recordedListSQL(t, hold, "now()", where) + " ORDER BY " + listedSQL(t) + " LIMIT $1"
		cs, err := db.candidates(ctx, t, sql, limit-len(all))
		all = append(all, cs...)
		return len(all) >= limit, err
	})
	return all, err
}

// Overtaken tells in which of the aggregates a row without a record is pending and
// due, and a later one is recorded: a session could not finish with the former, and
// had recorded the latter.
func (db *DB) Overtaken(
	ctx context.Context, t *outbox.Table, threshold time.Duration, among map[outbox.AggregateKey]bool,
) (map[outbox.AggregateKey]bool, error) {
	if !t.Layout.Records() || !t.Layout.Has(outbox.AggregateID) {
		return nil, nil
	}
	keys := map[outbox.AggregateKey]bool{}
	err := db.keys(ctx, overtakenSQL(t, threshold), func(key outbox.AggregateKey) {
		if among[key] {
			keys[key] = true
		}
	})
	if err != nil {
		return nil, fmt.Errorf("look for overtaken rows of %s: %w", t, err)
	}
	return keys, nil
}

// overtakenSQL reads the pending rows once. A join of the two kinds would compare
// each with each: statistics of a queue say that few rows are pending.
func overtakenSQL(t *outbox.Table, threshold time.Duration) string {
	recorded := PendingSQL(t, "r") + " AND " + recordedIs(t, "r")
	return strings.NewReplacer(
		"{x}", bytewise(columnsNameSQL(t)), "{key}", aggregateSQL(t), "{table}", sourceOf(t).pending,
		"{fresh}", freshWhere(t, threshold, anyHalf(t, threshold)),
		"{recorded}", recorded, "{pending}", PendingSQL(t, "t"),
		"{order}", orderSQL(t, "t"), "{last}", orderSQL(t, "r"),
		"{newest}", strings.Replace(orderSQL(t, "r"), ",", " DESC,", 1),
		"{aggregate}", t.Column(outbox.AggregateID),
		"{has}", recordedIs(t, "t"), "{lacks}", unrecordedIs(t, "t"), "{by}", partitionSQL(t),
	).Replace(`
SELECT DISTINCT {x} FROM (
	SELECT {key}, ({has}) IS TRUE AS recorded,
		bool_or({lacks}) OVER (PARTITION BY {by} ORDER BY {order}) AS behind
	FROM {table} t
	WHERE {pending} AND t.{aggregate} IS NOT NULL
		AND ({order}) <= (SELECT {last} FROM {table} r WHERE {recorded} ORDER BY {newest} DESC LIMIT 1)
		AND ({has} OR ({fresh}))
) x WHERE recorded AND behind`)
}

// candidates runs a query for id, name of the aggregate, recorded, scheduled, attempts,
// early, bytes.
func (db *DB) candidates(
	ctx context.Context, t *outbox.Table, sql string, args ...any,
) (cs []Candidate, err error) {
	err = db.QueryText(ctx, sql, args, func(v [][]byte) error {
		attempts, _ := strconv.Atoi(string(v[4]))
		bytes, _ := strconv.Atoi(string(v[6]))
		cs = append(cs, Candidate{
			ID: string(v[0]), Aggregate: outbox.KeyOfAggregateName(v[1]),
			Recorded: string(v[2]) == "t", Scheduled: string(v[3]) == "t", Early: string(v[5]) == "t",
			Attempts: attempts, Bytes: bytes,
		})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for pending rows of %s: %w", t, err)
	}
	return cs, nil
}

// Aggregates calls each with every aggregate that has a recorded row pending; the
// zero key stands for all rows that belong to none. each must not use db.
func (db *DB) Aggregates(ctx context.Context, t *outbox.Table, each func(outbox.AggregateKey)) error {
	if !t.Layout.Records() {
		return nil
	}
	hash, limit := recordedHash(t), partKeys+1
	if hash == "" {
		limit = 1 // the rows belong to no aggregate
	}
	err := db.keyParts.of(t).run(hash, func(where string) (bool, error) {
		sql := fmt.Sprintf(`SELECT DISTINCT %s FROM %s t WHERE %s%s LIMIT %d`,
			bytewise(nameSQL(t)), sourceOf(t).pending, recordedSQL(t), where, limit)
		var keys []outbox.AggregateKey
		err := db.keys(ctx, sql, func(key outbox.AggregateKey) { keys = append(keys, key) })
		switch {
		case err != nil:
			return false, err
		case len(keys) > partKeys:
			return false, errTooMany
		}
		for _, key := range keys {
			each(key)
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("look for recorded rows of %s: %w", t, err)
	}
	return nil
}

// partKeys is how many keys [DB.Aggregates] keeps until a statement has ended.
const partKeys = 100_000

// keys runs a query for names of aggregates.
func (db *DB) keys(ctx context.Context, sql string, each func(outbox.AggregateKey)) error {
	return db.QueryText(ctx, sql, nil, func(v [][]byte) error {
		each(outbox.KeyOfAggregateName(v[0]))
		return nil
	})
}

// fetchBytes is how much of the rows' values Fetch keeps.
const fetchBytes = 8 << 20

// Fetched is what Fetch has read.
type Fetched struct {
	// N is how many of the ids it has dealt with, at least one: not all, where rows turn out to be large.
	N    int
	Rows []*outbox.Event
	// Unreadable are rows that the server cannot send, by their ids, with what it said.
	Unreadable map[string]error
}

// Fetch reads rows that are still pending, in the order of their ids. Rows that
// somebody has locked are left out, and so are those that are gone or marked. No
// lock stays when it returns.
//
// mostPayload is the longest payload that is fetched, in bytes. What is longer, and what
// is too long for a header, is left out of the event (outbox.Event.Omitted).
func (db *DB) Fetch(
	ctx context.Context, t *outbox.Table, ids []string, mostPayload int,
) (f Fetched, err error) {
	more := false
	read := func(ids []string, length lengthExpr) (err error) {
		if more {
			return nil
		}
		var rows []*outbox.Event
		if rows, more, err = db.fetch(ctx, t, ids, mostPayload, length); err != nil {
			return err
		}
		f.Rows, f.N = append(f.Rows, rows...), f.N+len(ids)
		if more {
			last := slices.Index(ids, string(rows[len(rows)-1].Values[outbox.ID]))
			f.N += max(last+1, 1) - len(ids) // an id may be equal to another one by its collation
		}
		return nil
	}
	err = portions[string]{
		size: &db.portion, spoils: func(err error) bool { return isUnreadable(err) || mayBeLess(err) },
		do: func(ids []string) error { return read(ids, lengthSQL) },
		alone: func(id string, err error) error {
			if overLimit(err) {
				err = read([]string{id}, overLimitSQL)
			}
			var said *pgconn.PgError
			if !isUnreadable(err) || !errors.As(err, &said) {
				return err
			}
			if _, _, fault := db.fetch(ctx, t, nil, mostPayload, lengthSQL); fault != nil {
				return err // not the row's
			}
			if f.Unreadable == nil {
				f.Unreadable = map[string]error{}
			}
			f.Unreadable[id], f.N = said, f.N+1
			return nil
		},
	}.run(ids)
	if err != nil {
		return Fetched{}, err
	}
	return f, nil
}

// fetch is Fetch with the expression for a value's length.
func (db *DB) fetch(
	ctx context.Context, t *outbox.Table, ids []string, mostPayload int, length lengthExpr,
) (rows []*outbox.Event, more bool, err error) {
	sql, fields := fetchSQL(t, mostPayload, length)
	size := 0
	err = db.QueryText(ctx, sql, []any{ids}, func(v [][]byte) error {
		ev := eventOf(t, fields, v)
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

// eventOf reads the columns of valuesSQL. The event is valid as long as they are.
func eventOf(t *outbox.Table, fields []outbox.Field, v [][]byte) outbox.Event {
	ev := outbox.Event{Table: t}
	for i, f := range fields {
		if ev.Values[f] = v[2*i]; v[2*i+1] != nil {
			n, _ := strconv.Atoi(string(v[2*i+1]))
			ev.Omit(f, n)
		}
	}
	return ev
}

// lengthExpr is an expression for the length of a field's value: [lengthSQL] or [overLimitSQL].
type lengthExpr func(t *outbox.Table, f outbox.Field) string

// fetchSQL selects each field's value, and its length in place of one that is too long. It has no rows where
// another table has the outbox's name by now, or the table has other partitions.
//
// The length is asked as text: what is stored may be compressed, and a jsonb number of
// ten bytes may have 131,072 digits. A value that is too short for that is not rendered.
func fetchSQL(
	t *outbox.Table, mostPayload int, length lengthExpr,
) (sql string, fields []outbox.Field) {
	fields = fieldsOf(t)
	columns, lengths := valuesSQL(t, fields, mostPayload, length)
	sql = fmt.Sprintf(`SELECT %s FROM %s t, LATERAL (SELECT %s OFFSET 0) n
		WHERE t.%s = ANY ($1::text[]::%s[]) AND %s ORDER BY %s %s`,
		columns, sourceOf(t).all(givenIDs), lengths, t.Column(outbox.ID), t.IDType,
		UnmarkedSQL(t, "t")+FilterSQL(t, "t")+" AND "+presentSQL(t), orderSQL(t, "t"), sourceOf(t).lock)
	return sql, fields
}

// fieldsOf are the fields that a table has.
func fieldsOf(t *outbox.Table) (fields []outbox.Field) {
	for f := outbox.ID; f < outbox.NumFields; f++ {
		if t.Layout.Has(f) {
			fields = append(fields, f)
		}
	}
	return fields
}

// valuesSQL are the columns of t and n for each field: its value, and its length where it is too long.
// lengths are the columns of n.
func valuesSQL(
	t *outbox.Table, fields []outbox.Field, mostPayload int, length lengthExpr,
) (columns, lengths string) {
	var values, sizes []string
	for _, f := range fields {
		c, n := "t."+t.Column(f), fmt.Sprintf("n.n%d", f)
		sizes = append(sizes, fmt.Sprintf("CASE WHEN pg_column_size(%s) > 64 "+
			"THEN nullif(greatest(%s, %d), %[3]d) END AS n%d", c, length(t, f), f.Most(mostPayload), f))
		values = append(values,
			fmt.Sprintf("CASE WHEN %s IS NULL THEN %s END AS v%d, %[1]s AS n%[3]d", n, c, f))
	}
	return strings.Join(values, ", "), strings.Join(sizes, ", ")
}

// lengthSQL is a value's length as text, in bytes. Text is not read for it; other types are rendered.
func lengthSQL(t *outbox.Table, f outbox.Field) string {
	return renderedSQL("t."+t.Column(f), t.Text[f] || t.JSON[f])
}

// renderedSQL casts a value to text only where its type is one that no user can define such a cast for. For
// other types concat(), which copies the value once more, calls the type's output function.
func renderedSQL(c string, cast bool) string {
	if cast {
		return "octet_length(" + c + "::text)"
	}
	return "octet_length(concat(" + c + "))"
}

// leastOverLimit is a stored size that no value exceeds whose text has less than 1 GB, in bytes: of the
// densest, an array of numbers with 131,072 digits each, lz4 leaves more than twice as much.
const leastOverLimit = 256

// overLimitSQL is lengthSQL for a row in which the server has met a text over 1 GB. The server does not say
// which value that is: the length is outbox.MostText for each that may be it.
func overLimitSQL(t *outbox.Table, f outbox.Field) string {
	if t.Text[f] {
		return lengthSQL(t, f)
	}
	c := "t." + t.Column(f)
	return fmt.Sprintf("CASE WHEN pg_column_size(%s) > %d THEN %d ELSE %s END",
		c, leastOverLimit, outbox.MostText, lengthSQL(t, f))
}

// StillPending tells which of the rows are pending: of rows that Fetch left out,
// those that somebody has locked.
func (db *DB) StillPending(ctx context.Context, t *outbox.Table, ids []string) (pending []string, err error) {
	return db.stillPending(ctx, t, ids, "")
}

// stillPending is StillPending with a further condition.
func (db *DB) stillPending(
	ctx context.Context, t *outbox.Table, ids []string, and string,
) (pending []string, err error) {
	sql := fmt.Sprintf(`SELECT t.%s FROM %s t WHERE t.%[1]s = ANY ($1::text[]::%[3]s[]) AND %[4]s`,
		t.Column(outbox.ID), sourceOf(t).all(givenIDs), t.IDType, UnmarkedSQL(t, "t")+FilterSQL(t, "t")+and)
	err = db.QueryText(ctx, sql, []any{ids}, func(v [][]byte) error {
		pending = append(pending, string(v[0]))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for rows that are still pending in %s: %w", t, err)
	}
	return pending, nil
}

// NextDue is how long it takes until the next row that is scheduled falls due; ok
// is false where none is.
func (db *DB) NextDue(ctx context.Context, t *outbox.Table) (wait time.Duration, ok bool, err error) {
	if !t.Layout.Has(outbox.AvailableAt) {
		return 0, false, nil
	}
	at := t.Column(outbox.AvailableAt)
	sql := fmt.Sprintf(`SELECT
			extract(epoch FROM least(t.%s, now() + interval '1 day') - clock_timestamp())::float8
		FROM %s t WHERE %s AND t.%[1]s > now() ORDER BY t.%[1]s LIMIT 1`,
		at, sourceOf(t).due, PendingSQL(t, "t"))
	var seconds float64
	err = db.QueryRow(ctx, []any{&seconds}, sql)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("look for the next due row of %s: %w", t, err)
	}
	return max(time.Duration(seconds*float64(time.Second)), 0), true, nil
}

// recordedSQL is the condition under which a row is parked or held. One that is dead and
// kept is neither.
func recordedSQL(t *outbox.Table) string {
	// Only the index of recorded rows answers to the canonical table's condition. Another table may lack that
	// index, and have one of pending rows.
	pending := UnmarkedSQL(t, "t") + FilterSQL(t, "t")
	if t.Layout.Name != outbox.Canonical().Name {
		pending += " AND " + t.PendingSQL("t")
	}
	return fmt.Sprintf("%s AND %s AND NOT %s", pending, recordedIs(t, "t"), keptIs(t, "t"))
}

var aggregateFields = [...]outbox.Field{outbox.TenantID, outbox.AggregateType, outbox.AggregateID}

// aggregateColumns are those that make an aggregate's key; "NULL" where there is none.
func aggregateColumns(t *outbox.Table) (columns [3]string) {
	for i, f := range aggregateFields {
		columns[i] = "NULL"
		if t.Layout.Has(f) {
			columns[i] = "t." + t.Column(f)
		}
	}
	return columns
}

// aggregateSQL selects them by fixed names, of which columnsNameSQL is the name.
func aggregateSQL(t *outbox.Table) string {
	c := aggregateColumns(t)
	return fmt.Sprintf("%s AS tenant, %s AS kind, %s AS aggregate", c[0], c[1], c[2])
}

func columnsNameSQL(t *outbox.Table) string {
	return t.AggregateNameSQL("x.tenant", "x.kind", "x.aggregate")
}

// nameSQL is the name of a row's aggregate.
func nameSQL(t *outbox.Table) string {
	c := aggregateColumns(t)
	return t.AggregateNameSQL(c[0], c[1], c[2])
}

// bytewise compares names as the relay does. Otherwise they are compared by the columns' collation, which may
// take different names for equal.
func bytewise(name string) string { return "(" + name + `) COLLATE "C"` }

// partitionSQL lists the columns that tell aggregates apart; "" where the layout knows none. Aggregates whose
// columns are equal but have different texts are one partition: they wait for each other.
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
