package deadletter

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// Listed is a dead letter, and the length of its payload in bytes: nil where there is none, or it would take
// long to read.
type Listed struct {
	Letter
	Bytes *int `json:"payload_bytes"`
}

// measuredBytes is how much an original row may take in the table, for the length of its payload to be read.
const measuredBytes = 64 << 10

func (q *Queue) listedColumns() string {
	return fmt.Sprintf("%s, CASE WHEN pg_column_size(d.original) <= %d THEN octet_length(%s) END",
		q.columns(), measuredBytes, q.field(outbox.Payload))
}

// Newest reads the dead letters that pass the filter, newest first, up to its limit. Their ids are below
// before; 0 is no limit.
func (q *Queue) Newest(ctx context.Context, f Filter, before int64) ([]Listed, error) {
	where, args, err := q.where(ctx, f)
	if err != nil {
		return nil, q.explain(ctx, err, "list dead letters")
	}
	if before > 0 {
		args = append(args, before)
		where += fmt.Sprintf(" AND d.dead_letter_id < $%d", len(args))
	}
	rows, _ := q.conn.Query(ctx, fmt.Sprintf(
		`SELECT %s FROM %s d WHERE %s ORDER BY d.dead_letter_id DESC LIMIT %d`,
		q.listedColumns(), q.table, where, f.Limit), args...)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Listed])
	return all, q.explain(ctx, err, "list dead letters")
}

// Peek reads one dead letter with the beginning of its payload, up to a number of characters; nil is NULL.
func (q *Queue) Peek(ctx context.Context, id int64, most int) (l Listed, payload *string, err error) {
	rows, _ := q.conn.Query(ctx, fmt.Sprintf(`SELECT %s, octet_length(%s), left(%[2]s, %d)
		FROM %s d WHERE d.dead_letter_id = $1`, q.columns(), q.field(outbox.Payload), most, q.table), id)
	one, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[struct {
		Listed
		Payload *string
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		return l, nil, hint.Wrap(fmt.Errorf("dead letter %d: %w", id, ErrNone),
			"`walpost dlq list` shows those that are there")
	}
	return one.Listed, one.Payload, q.explain(ctx, err, "show dead letter")
}

// ErrNone means that there is no dead letter of an id, or none any more.
var ErrNone = errors.New("there is none")
