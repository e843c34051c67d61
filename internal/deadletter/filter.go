package deadletter

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Filter chooses the dead letters that meet all its conditions. The zero value chooses all.
type Filter struct {
	IDs       []int64 // dead letter ids; nil is any
	EventType string
	// The aggregate, as text; "" is any.
	AggregateType, AggregateID, TenantID string
	Outbox                               string // "schema.table"
	Class                                string // last_error begins with "<class>: "
	// OlderThan and NewerThan compare the time since the row became a dead letter;
	// zero is no limit.
	OlderThan, NewerThan time.Duration
	// Limit is the greatest number of dead letters; zero is no limit.
	Limit int

	moment *moment // see Queue.Now; nil stands for the time when the filter is used
}

// moment is a time by the server's clock, and the id of the newest dead letter then.
type moment struct {
	at   time.Time
	upto int64
}

// where is the filter as a condition over the alias d. It leaves out dead letters that came later: while the
// cause remains, a retry makes new ones, and would never end.
func (q *Queue) where(ctx context.Context, f Filter) (string, []any, error) {
	f, err := q.now(ctx, f)
	if err != nil {
		return "", nil, err
	}
	now := f.moment.at
	conditions, args := []string{"d.dead_letter_id <= $1"}, []any{f.moment.upto}
	add := func(format string, arg any) {
		args = append(args, arg)
		conditions = append(conditions, fmt.Sprintf(format, len(args)))
	}
	if f.IDs != nil {
		add("d.dead_letter_id = ANY($%d::bigint[])", f.IDs)
	}
	if f.Outbox != "" {
		add("d.outbox = $%d", f.Outbox)
	}
	for field, want := range map[outbox.Field]string{
		outbox.EventType: f.EventType, outbox.TenantID: f.TenantID,
		outbox.AggregateType: f.AggregateType, outbox.AggregateID: f.AggregateID,
	} {
		if want != "" {
			add(q.field(field)+" = $%d", want)
		}
	}
	if f.Class != "" {
		add("starts_with(d.last_error, $%d)", f.Class+": ")
	}
	if f.OlderThan != 0 {
		add("d.failed_at <= $%d", now.Add(-f.OlderThan))
	}
	if f.NewerThan != 0 {
		add("d.failed_at > $%d", now.Add(-f.NewerThan))
	}
	return strings.Join(conditions, " AND "), args, nil
}

// field is the SQL for a field's text. It reads the original row: the dead letter's column may have a type
// that cannot hold the value. Where the outbox is not configured, it tries the columns of the preset layouts.
func (q *Queue) field(f outbox.Field) string {
	if f == outbox.EventType || f == outbox.AggregateType {
		return fmt.Sprintf("d.%s", f) // a text column holds any value
	}
	original := func(column string) string { return "d.original ->> " + pg.QuoteLiteral(column) }
	text := "NULL"
	for _, column := range slices.Backward(outbox.PresetColumns(f)) {
		text = fmt.Sprintf("coalesce(%s, %s)", original(column), text)
	}
	cases := ""
	for _, t := range q.cfg.Outboxes {
		value := "NULL"
		if t.Layout.Has(f) {
			value = original(t.Layout.Columns[f])
		}
		cases += fmt.Sprintf(" WHEN %s THEN %s", pg.QuoteLiteral(t.String()), value)
	}
	if cases != "" {
		text = fmt.Sprintf("CASE d.outbox%s ELSE %s END", cases, text)
	}
	return fmt.Sprintf("coalesce(%s, d.%s::text)", text, f)
}

// Now fixes the filter's time: however long its use takes, it chooses no dead letter that came, or grew old
// enough, meanwhile.
func (q *Queue) Now(ctx context.Context, f Filter) (Filter, error) {
	f, err := q.now(ctx, f)
	return f, q.explain(ctx, err, "read dead letters")
}

func (q *Queue) now(ctx context.Context, f Filter) (Filter, error) {
	if f.moment != nil {
		return f, nil
	}
	var m moment
	err := q.conn.QueryRow(ctx, `SELECT now(), coalesce(max(dead_letter_id), 0) FROM `+q.table).
		Scan(&m.at, &m.upto)
	f.moment = &m
	return f, err
}

// deadLetterBatch is the number of dead letters that are read, or changed in one
// transaction, at a time.
const deadLetterBatch = 250

// walk reads the dead letters that pass the filter, in the order of their ids, and hands them over page by
// page. It holds no transaction between two pages.
func walk[T interface{ key() int64 }](
	ctx context.Context, q *Queue, f Filter, columns string, do func([]T) error,
) error {
	where, args, err := q.where(ctx, f)
	if err != nil {
		return err
	}
	sql := fmt.Sprintf(`SELECT %s FROM %s d
		WHERE %s AND d.dead_letter_id > $%d ORDER BY d.dead_letter_id LIMIT $%d`,
		columns, q.table, where, len(args)+1, len(args)+2)
	last := int64(0)
	for left := f.Limit; ; {
		size := deadLetterBatch
		if f.Limit > 0 {
			size = min(size, left)
		}
		rows, _ := q.conn.Query(ctx, sql, append(args, last, size)...)
		page, err := pgx.CollectRows(rows, pgx.RowToStructByPos[T])
		if err != nil {
			return err
		}
		if err := do(page); err != nil {
			return err
		}
		if left -= size; len(page) < size || left == 0 {
			return nil
		}
		last = page[len(page)-1].key()
	}
}
