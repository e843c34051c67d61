// Package deadletter is what the commands do with dead letters: list, show, retry and discard them, beside a relay
// that may be running. How a row becomes one stands in package fallback, with the statements that take it out.
package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Config says where the dead letters are, and which outboxes they may go back
// to.
type Config struct {
	fallback.Config
	// Publication and Slot are asked for where a row can only go through the WAL
	// (mark none).
	Publication string
	Outboxes    []*outbox.Table
}

// Queue looks at dead letters, puts them back and discards them, beside a relay
// that may be running: it takes no lock of the relay's and publishes nothing. It
// is not safe for concurrent use, but any number may work at the same time.
type Queue struct {
	conn    *pgx.Conn
	table   string // the dead letters, with their schema
	cfg     Config
	targets map[string]*target
}

// Open connects. A statement waits half a minute for a lock, and otherwise as
// long as it takes.
func Open(ctx context.Context, cfg Config) (*Queue, error) {
	conn, err := fallback.Connect(ctx, cfg.Config)
	if err != nil {
		return nil, err
	}
	// As on the relay's own connection: rows are looked up by key, and a policy
	// that hides some is an error.
	_, err = conn.Exec(ctx, `SET lock_timeout = '30s'; SET row_security = off;
		SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off`)
	var table string
	if err == nil {
		table, err = findTable(ctx, conn, cfg.Schema)
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, fmt.Errorf("prepare session: %w", err)
	}
	return &Queue{conn: conn, table: table, cfg: cfg, targets: map[string]*target{}}, nil
}

func findTable(ctx context.Context, conn *pgx.Conn, schema string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	found, err := pg.FindTables(ctx, conn, schema, fallback.DeadLetters)
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// Close gives up the connection.
func (q *Queue) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = q.conn.Close(ctx)
}

// Letter is one row of the dead letters. nil is NULL, or not known.
type Letter struct {
	ID            int64     `json:"dead_letter_id"`
	Outbox        string    `json:"outbox"` // "schema.table"
	RowID         string    `json:"row_id"`
	EventType     *string   `json:"event_type"`
	TenantID      *string   `json:"tenant_id"`
	AggregateType *string   `json:"aggregate_type"`
	AggregateID   *string   `json:"aggregate_id"`
	Attempts      *int16    `json:"attempts"`
	FailedAt      time.Time `json:"failed_at"`
	LastError     *string   `json:"last_error"`
	// Age is the time since FailedAt by the server's clock.
	Age time.Duration `json:"-"`
}

func (l Letter) key() int64 { return l.ID }

const (
	// listedChars is how much is read of a text in a list, in characters.
	listedChars = 4096
	// shownBytes is the longest value that Show reads, and shownOriginal the longest
	// original, in bytes.
	shownBytes    = 1 << 20
	shownOriginal = 4 << 20
)

func (q *Queue) columns() string {
	listed := func(text string) string { return fmt.Sprintf("left(%s, %d)", text, listedChars) }
	return fmt.Sprintf("d.dead_letter_id, d.outbox, %s, %s, %s, %s, %s, d.attempts, d.failed_at, %s, now() - d.failed_at",
		listed("d.row_id"), listed(q.field(outbox.EventType)), listed(q.field(outbox.TenantID)), listed(q.field(outbox.AggregateType)),
		listed(q.field(outbox.AggregateID)), listed("d.last_error"))
}

// List hands the dead letters that pass the filter to each, oldest first, until
// each returns an error.
func (q *Queue) List(ctx context.Context, f Filter, each func(Letter) error) error {
	err := walk(ctx, q, f, q.columns(), func(page []Letter) error {
		for _, l := range page {
			if err := each(l); err != nil {
				return err
			}
		}
		return nil
	})
	return q.explain(err, "list dead letters")
}

// Count counts the dead letters that pass the filter, whatever its limit, and
// stops at most.
func (q *Queue) Count(ctx context.Context, f Filter, most int) (n int, err error) {
	where, args, err := q.where(ctx, f)
	if err == nil {
		sql := fmt.Sprintf(`SELECT count(*)::int FROM (SELECT FROM %s d WHERE %s LIMIT %d) x`, q.table, where, most)
		err = q.conn.QueryRow(ctx, sql, args...).Scan(&n)
	}
	return n, q.explain(err, "count dead letters")
}

// Whole is a dead letter with the row that it was.
type Whole struct {
	Letter
	// Payload is the row's, as its type renders it; nil where it is NULL, where the
	// outbox is not configured and the payload not jsonb, or where it is longer than 1 MiB.
	Payload *string
	// Original is the row as it is stored, one JSON object; nil is none, or one of more
	// than 4 MiB. Columns is the same taken apart. Size is its length in bytes.
	Original []byte
	Size     int
	Columns  []Column
}

// Column is one value of a row, as its type renders it, and its length in bytes; nil is
// NULL, or a value of more than 1 MiB.
type Column struct {
	Name  string
	Value *string
	Size  int
}

// Show reads one dead letter.
func (q *Queue) Show(ctx context.Context, id int64) (*Whole, error) {
	w := new(Whole)
	l := &w.Letter
	err := q.conn.QueryRow(ctx, fmt.Sprintf(`SELECT %s, CASE WHEN octet_length(%s) <= %d THEN %[2]s END,
			CASE WHEN octet_length(d.original::text) <= %[4]d THEN d.original::text END, coalesce(octet_length(d.original::text), 0)
		FROM %[5]s d WHERE d.dead_letter_id = $1`, q.columns(), q.field(outbox.Payload), shownBytes, shownOriginal, q.table), id).
		Scan(&l.ID, &l.Outbox, &l.RowID, &l.EventType, &l.TenantID, &l.AggregateType, &l.AggregateID, &l.Attempts, &l.FailedAt,
			&l.LastError, &l.Age, &w.Payload, &w.Original, &w.Size)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, hint.Errorf("`walpost dlq list` shows those that are there", "there is no dead letter %d", id)
	}
	if err == nil {
		rows, _ := q.conn.Query(ctx, fmt.Sprintf(`SELECT e.key, CASE WHEN octet_length(e.value) <= %d THEN e.value END, coalesce(octet_length(e.value), 0)
			FROM %s d, json_each_text(CASE WHEN json_typeof(d.original) = 'object' THEN d.original END) e WHERE d.dead_letter_id = $1`, shownBytes, q.table), id)
		w.Columns, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Column])
	}
	return w, q.explain(err, "show dead letter")
}

// explain adds what was being done, and what helps.
func (q *Queue) explain(err error, doing string, privileges ...string) error {
	if err == nil {
		return nil
	}
	return fallback.ExplainLetters(fmt.Errorf("%s: %w", doing, err), q.conn.Config().User, privileges...)
}
