package table

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walpost/walpost/outbox"
)

// A row's last_error begins with one of these where it is not a failure. No failure begins so.
const (
	// Held begins the last_error of a row that waits behind a failed row of its aggregate.
	Held = "held: "
	// Kept begins the last_error of a dead row that stays in its outbox because it is too large to be moved,
	// or the server cannot send it. It has a dead letter, is not tried again, and holds no other row.
	Kept = "kept: "
	// Skipped begins the last_error of rows that are marked and were not to be sent: a first start with
	// postgres.initial "none" passed over them, or they were inserted as processed. Where a layout has no
	// last_error, such a row has no processed_at.
	Skipped = "skipped: "
	// retryAfter begins the last_error of a failed row where the layout has no available_at: the time of the
	// next try follows, and then ": " and the failure. Such times are compared as texts.
	retryAfter   = "retry after "
	retryForm    = `YYYY-MM-DD"T"HH24:MI:SS.US"Z"`
	retryPattern = `^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{15}Z$`
	retryBytes   = 27
)

// IsMarked reports whether a row says that it is delivered or dead.
func IsMarked(ev *outbox.Event) bool {
	l := &ev.Table.Layout
	if l.Has(outbox.Status) {
		status := string(ev.Values[outbox.Status])
		return status != "" && (status == l.States[outbox.Done] || status == l.States[outbox.Dead])
	}
	return MarkOf(ev.Table).Stays() && ev.Values[outbox.ProcessedAt] != nil
}

// IsRecorded reports whether a failure or a hold is recorded in a row.
func IsRecorded(ev *outbox.Event) bool {
	if l := &ev.Table.Layout; !l.Has(outbox.LastError) {
		failed := l.States[outbox.Failed]
		return failed != "" && string(ev.Values[outbox.Status]) == failed
	}
	return ev.Values[outbox.LastError] != nil
}

// IsHeld reports whether a row says that it is held.
func IsHeld(ev *outbox.Event) bool {
	if !ev.Table.Layout.Has(outbox.LastError) {
		attempts := string(ev.Values[outbox.Attempts])
		return IsRecorded(ev) && (attempts == "" || attempts == "0")
	}
	return strings.HasPrefix(string(ev.Values[outbox.LastError]), Held)
}

// recordedIs is [IsRecorded] in SQL.
func recordedIs(t *outbox.Table, alias string) string {
	if alias != "" {
		alias += "."
	}
	switch l := &t.Layout; {
	case l.Has(outbox.LastError):
		return fmt.Sprintf("%s%s IS NOT NULL", alias, t.Column(outbox.LastError))
	case l.States[outbox.Failed] != "":
		return fmt.Sprintf("%s%s = %s",
			alias, t.Column(outbox.Status), outbox.QuoteLiteral(l.States[outbox.Failed]))
	}
	return "false"
}

// unrecordedIs is its opposite.
func unrecordedIs(t *outbox.Table, alias string) string {
	if t.Layout.Has(outbox.LastError) {
		return fmt.Sprintf("%s.%s IS NULL", alias, t.Column(outbox.LastError))
	}
	return "(" + recordedIs(t, alias) + ") IS NOT TRUE"
}

// heldIs is [IsHeld] in SQL, of a recorded row.
func heldIs(t *outbox.Table, alias string) string {
	if t.Layout.Has(outbox.LastError) {
		return fmt.Sprintf("%s.%s LIKE '%s%%'", alias, t.Column(outbox.LastError), Held)
	}
	return fmt.Sprintf("coalesce(%s.%s, 0) = 0", alias, t.Column(outbox.Attempts))
}

// keptIs is the condition that a recorded row is kept. Where a layout has no last_error, no pending row is.
func keptIs(t *outbox.Table, alias string) string {
	if t.Layout.Has(outbox.LastError) {
		return fmt.Sprintf("left(%s.%s, %d) = '%s'", alias, t.Column(outbox.LastError), len(Kept), Kept)
	}
	return "false"
}

// readyIs is the condition that a recorded row may be tried at a time.
func readyIs(t *outbox.Table, alias, now string) string {
	held := heldIs(t, alias)
	if t.Layout.Has(outbox.AvailableAt) {
		due := alias + "." + t.Column(outbox.AvailableAt)
		return fmt.Sprintf("(%s OR (%s <= %s) IS NOT FALSE)", held, due, now)
	}
	reason := alias + "." + t.Column(outbox.LastError)
	at := fmt.Sprintf("substr(%s, %d, %d)", reason, len(retryAfter)+1, retryBytes)
	return fmt.Sprintf("(%s OR (left(%s, %d) = '%s' AND %s ~ '%s' "+
		"AND %[5]s COLLATE \"C\" > %[7]s) IS NOT TRUE)",
		held, reason, len(retryAfter), retryAfter, at, retryPattern, retryTimeSQL(now))
}

// retryTimeSQL is a time as a failure that begins with retryAfter has it.
func retryTimeSQL(at string) string {
	return fmt.Sprintf("to_char(%s AT TIME ZONE 'UTC', '%s')", at, retryForm)
}

// parkSets are the assignments that record a failure in the row t, which failure and wait give: the latter as
// an interval, or NULL.
func parkSets(t *outbox.Table, failure, wait string, backoff time.Duration) *sets {
	attempts := fmt.Sprintf("coalesce(t.%s, 0)::int + 1", t.Column(outbox.Attempts))
	next := fmt.Sprintf("now() + GREATEST(LEAST(%s, 8) * %d * interval '1 microsecond', %s)",
		attempts, backoff.Microseconds(), wait)
	s := &sets{table: t}
	s.add(outbox.Attempts, "LEAST("+attempts+", 32767)")
	if s.add(outbox.AvailableAt, next); !t.Layout.Has(outbox.AvailableAt) {
		failure = fmt.Sprintf("concat('%s', %s, ': ', %s)", retryAfter, retryTimeSQL("("+next+")"), failure)
	}
	s.add(outbox.LastError, failure)
	s.state(outbox.Failed)
	return s
}

// holdSets are the assignments that record a hold in a row.
func holdSets(t *outbox.Table, note string) *sets {
	s := &sets{table: t}
	if s.add(outbox.LastError, outbox.QuoteLiteral(note)); !t.Layout.Has(outbox.LastError) {
		s.add(outbox.Attempts, "0")
		s.add(outbox.AvailableAt, "now()")
		s.state(outbox.Failed)
	}
	return s
}

// pendingSets are the assignments that make a row pending again, held where the layout can say so.
func pendingSets(t *outbox.Table, note string) *sets {
	s := &sets{table: t}
	s.add(outbox.ProcessedAt, "NULL")
	if !t.Layout.Records() || t.Layout.Has(outbox.LastError) {
		s.unsettle()
	}
	if t.Layout.Records() {
		s.all = append(s.all, holdSets(t, note).all...)
	}
	return s
}

// RetrySets are the assignments that make a dead row pending again: as pendingSets, without attempts and due
// at once.
func RetrySets(t *outbox.Table, note string) string { return retrySets(t, note).sql() }

// WakeSQL is CTEs that make dead rows pending again that have stayed in their outbox: those with the ids of
// the CTE "free". The last one, "woken", has their ids as text.
func WakeSQL(t *outbox.Table, note string) string { return MarkOf(t).wakeSQL(t, retrySets(t, note)) }

// wakeSQL implements Mark.
func (inRow) wakeSQL(t *outbox.Table, s *sets) string {
	if t.Layout.States[outbox.Dead] == "" {
		return "woken AS (SELECT NULL::text AS id WHERE false)"
	}
	return fmt.Sprintf(`woken AS (UPDATE %s t SET %s WHERE t.%s = ANY (ARRAY(SELECT f.id FROM free f)) AND %s
		RETURNING concat(t.%[3]s) AS id)`, t.SQL(), s.sql(), t.Column(outbox.ID), DeadSQL(t, "t", ""))
}

func retrySets(t *outbox.Table, note string) *sets {
	s := &sets{table: t}
	s.add(outbox.ProcessedAt, "NULL")
	s.unsettle()
	if note = outbox.QuoteLiteral(note); !t.Layout.Records() {
		note = "NULL"
	}
	s.add(outbox.LastError, note)
	s.add(outbox.Attempts, "0")
	s.add(outbox.AvailableAt, "now()")
	return s
}

// sets are assignments to columns that the layout has.
type sets struct {
	table *outbox.Table
	all   []assignment
}

type assignment struct {
	field outbox.Field
	value string
}

func (s *sets) add(f outbox.Field, value string) {
	if s.table.Layout.Has(f) {
		s.all = append(s.all, assignment{f, value})
	}
}

// state sets the status, where the layout has a value for it.
func (s *sets) state(state outbox.State) {
	if value := s.table.Layout.States[state]; value != "" {
		s.add(outbox.Status, outbox.QuoteLiteral(value))
	}
}

// unsettle sets the status of a row that is neither delivered nor dead.
func (s *sets) unsettle() {
	if s.state(outbox.Failed); s.table.Layout.States[outbox.Failed] == "" {
		s.add(outbox.Status, "DEFAULT")
	}
}

// value is what a field is set to.
func (s *sets) value(f outbox.Field) (value string, ok bool) {
	i := slices.IndexFunc(s.all, func(a assignment) bool { return a.field == f })
	if i < 0 {
		return "", false
	}
	return s.all[i].value, true
}

func (s *sets) sql() string {
	var all []string
	for _, a := range s.all {
		all = append(all, s.table.Column(a.field)+" = "+a.value)
	}
	return strings.Join(all, ", ")
}
