// Package deadletter lists, shows, retries and discards dead letters for the commands. A relay may be running
// meanwhile. Package table makes a row a dead letter.
package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Config says where the dead letters are, and to which outboxes they may go back.
type Config struct {
	table.Config
	Outboxes []*outbox.Table
}

// Queue reads, retries and discards dead letters. It takes none of the relay's locks and publishes nothing: a
// relay and other queues may work at the same time. A Queue is not safe for concurrent use.
type Queue struct {
	conn    *pgx.Conn
	table   string // the dead letters, with their schema
	cfg     Config
	targets map[string]*target
}

// Open connects. A statement waits half a minute for a lock, or five seconds in [Queue.Retry], and may
// otherwise take any time.
func Open(ctx context.Context, cfg Config) (*Queue, error) {
	conn, err := table.Connect(ctx, cfg.Config)
	if err != nil {
		return nil, err
	}
	// As on the relay's connection: rows are looked up by key, and a row security policy that would hide some
	// is an error.
	_, err = conn.Exec(ctx, `
		SET lock_timeout = '30s'; SET row_security = off;
		SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off`)
	var q *Queue
	if err == nil {
		q, err = On(ctx, conn, cfg)
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, fmt.Errorf("prepare session: %w", err)
	}
	return q, nil
}

// On works on a connection of package table's that is there, and is not to be closed.
func On(ctx context.Context, conn *pgx.Conn, cfg Config) (*Queue, error) {
	name, err := findTable(ctx, conn, cfg.Own)
	if err != nil {
		return nil, err
	}
	if err := table.Bind(ctx, conn, cfg.Own, cfg.Outboxes); err != nil {
		return nil, err
	}
	return &Queue{conn: conn, table: name, cfg: cfg, targets: map[string]*target{}}, nil
}

func findTable(ctx context.Context, conn *pgx.Conn, where pg.Own) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	found, err := where.Find(ctx, conn, table.DeadLetters)
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// Close closes the connection.
func (q *Queue) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = q.conn.Close(ctx)
}

// Letter is one dead letter. nil is NULL, or not known.
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
	// listedChars bounds, in characters, what List reads of a text.
	listedChars = 4096
	// shownBytes and shownOriginal bound, in bytes, the values and the original row that Show reads.
	shownBytes    = 1 << 20
	shownOriginal = 4 << 20
)

func (q *Queue) columns() string {
	listed := func(text string) string { return fmt.Sprintf("left(%s, %d)", text, listedChars) }
	return fmt.Sprintf("d.dead_letter_id, d.outbox, %s, %s, %s, %s, %s, "+
		"d.attempts, d.failed_at, %s, now() - d.failed_at",
		listed("d.row_id"), listed(q.field(outbox.EventType)), listed(q.field(outbox.TenantID)),
		listed(q.field(outbox.AggregateType)), listed(q.field(outbox.AggregateID)), listed("d.last_error"))
}

// List calls each with the dead letters that pass the filter, oldest first, until each returns an error.
func (q *Queue) List(ctx context.Context, f Filter, each func(Letter) error) error {
	err := walk(ctx, q, f, q.columns(), func(page []Letter) error {
		for _, l := range page {
			if err := each(l); err != nil {
				return err
			}
		}
		return nil
	})
	return q.explain(ctx, err, "list dead letters")
}

// Count counts the dead letters that pass the filter, up to most. It ignores the filter's limit.
func (q *Queue) Count(ctx context.Context, f Filter, most int) (n int, err error) {
	where, args, err := q.where(ctx, f)
	if err == nil {
		sql := fmt.Sprintf(`SELECT count(*)::int FROM (SELECT FROM %s d WHERE %s LIMIT %d) x`,
			q.table, where, most)
		err = q.conn.QueryRow(ctx, sql, args...).Scan(&n)
	}
	return n, q.explain(ctx, err, "count dead letters")
}

// Whole is a dead letter with the row that it was.
type Whole struct {
	Letter
	// Payload is the row's payload as text. nil: it is NULL, or longer than 1 MiB, or its column is not
	// known, because the outbox is not configured and has no preset layout.
	Payload *string
	// Original is the row as one JSON object, and Size its length in bytes. nil: there is none, or it is
	// longer than 4 MiB.
	Original []byte
	Size     int
	Columns  []Column // of the original
}

// Column is one value of a row as text, and its length in bytes. nil: it is NULL, or longer than 1 MiB.
type Column struct {
	Name  string
	Value *string
	Size  int
}

// Show reads one dead letter.
func (q *Queue) Show(ctx context.Context, id int64) (*Whole, error) {
	w := new(Whole)
	l := &w.Letter
	err := q.conn.QueryRow(ctx, q.showSQL(), id).Scan(
		&l.ID, &l.Outbox, &l.RowID, &l.EventType, &l.TenantID, &l.AggregateType, &l.AggregateID,
		&l.Attempts, &l.FailedAt, &l.LastError, &l.Age, &w.Payload, &w.Original, &w.Size)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, hint.Errorf("`walpost dlq list` shows those that are there",
			"there is no dead letter %d", id)
	}
	if err == nil {
		rows, _ := q.conn.Query(ctx, q.originalSQL(), id)
		w.Columns, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Column])
	}
	return w, q.explain(ctx, err, "show dead letter")
}

// showSQL reads dead letter $1 with its payload and its original row.
func (q *Queue) showSQL() string {
	return fmt.Sprintf(`
		SELECT %s, CASE WHEN octet_length(%s) <= %d THEN %[2]s END,
			CASE WHEN octet_length(d.original::text) <= %[4]d THEN d.original::text END,
			coalesce(octet_length(d.original::text), 0)
		FROM %[5]s d WHERE d.dead_letter_id = $1`,
		q.columns(), q.field(outbox.Payload), shownBytes, shownOriginal, q.table)
}

// originalSQL reads the columns of dead letter $1's original row.
func (q *Queue) originalSQL() string {
	return fmt.Sprintf(`
		SELECT e.key, CASE WHEN octet_length(e.value) <= %d THEN e.value END,
			coalesce(octet_length(e.value), 0)
		FROM %s d, json_each_text(CASE WHEN json_typeof(d.original) = 'object' THEN d.original END) e
		WHERE d.dead_letter_id = $1`, shownBytes, q.table)
}
