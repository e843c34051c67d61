package consumers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Tables are walpost's tables of consumers in one database.
type Tables struct {
	conn   *pgx.Conn
	schema string
}

// Open connects.
func Open(ctx context.Context, cfg pg.Config, own pg.Own) (*Tables, error) {
	conn, err := pg.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	t, err := On(ctx, conn, own)
	if err != nil {
		_ = conn.Close(ctx)
	}
	return t, err
}

// On works on a connection that is there, and is not to be closed.
func On(ctx context.Context, conn *pgx.Conn, own pg.Own) (*Tables, error) {
	own.Schemas, own.Names = nil, nil // the outboxes may be in another database, and their owners there
	_, err := own.Find(ctx, conn,
		"consumer_definitions", "consumer_offsets", "consumer_seen", "consumer_parked")
	return &Tables{conn, own.Schema}, err
}

// Close closes the connection.
func (t *Tables) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = t.conn.Close(ctx) // nothing is open on it
}

func (t *Tables) sql(text string) string {
	return strings.ReplaceAll(text, "{schema}", outbox.QuoteIdent(t.schema))
}

// ErrNoTables is the cause where the schema has no tables of consumers.
var ErrNoTables = errors.New("no tables of consumers")

// explain says what was being done, and what helps.
func (t *Tables) explain(err error, format string, args ...any) error {
	doing := fmt.Sprintf(format, args...)
	const advice = "make them with `walpost migrate up --only consumer`, as the owner of the schema; " +
		"or name the database and the --schema in which the handlers work"
	switch pg.Code(err) {
	case pgerrcode.UndefinedTable, pgerrcode.InvalidSchemaName:
		return hint.Errorf(advice, "%s: schema %s of database %s has %w",
			doing, t.schema, t.conn.Config().Database, ErrNoTables)
	case pgerrcode.UndefinedColumn:
		err = hint.Wrap(err, advice)
	case pgerrcode.InsufficientPrivilege:
		err = hint.Wrap(err, "connect as the consumer's role, or as the owner of its tables")
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// Consumer is one consumer and its partitions.
type Consumer struct {
	Name        string      `json:"consumer"`
	Stream      string      `json:"stream"`
	Filters     []string    `json:"filters"`
	Start       string      `json:"start"`
	Partitions  []Partition `json:"partitions"`
	Parked      int64       `json:"parked"`
	DeadLetters int64       `json:"dead_letters"`
	// Processes is how many run the consumer now.
	Processes int `json:"processes"`
}

// Partition is how far it is, and who has it.
type Partition struct {
	Key int `json:"partition"`
	// Sequence is the stream's, up to which everything is settled. At is when it was written.
	Sequence uint64     `json:"sequence"`
	At       *time.Time `json:"at"`
	// StoredAt is when the stream stored the last message before it.
	StoredAt *time.Time `json:"stored_at"`
	Epoch    int64      `json:"epoch"`
	Owner    string     `json:"owner"` // address and process id of its connection; empty without an owner
}

// Position is the lowest sequence of the partitions.
func (c *Consumer) Position() uint64 {
	lowest := c.Partitions[0].Sequence
	for _, p := range c.Partitions {
		lowest = min(lowest, p.Sequence)
	}
	return lowest
}

// Owned is how many partitions a process has.
func (c *Consumer) Owned() (n int) {
	for _, p := range c.Partitions {
		if p.Owner != "" {
			n++
		}
	}
	return n
}

const listSQL = `SELECT d.consumer_name, d.stream, d.filter_subjects, d.start_at,
		o.partition_key, o.last_processed_id, o.last_processed_at, o.anchor_stored_at, o.epoch,
		(SELECT count(*) FROM {schema}.consumer_parked k
			WHERE k.consumer_name = d.consumer_name AND k.dead_at IS NULL),
		(SELECT count(*) FROM {schema}.consumer_parked k
			WHERE k.consumer_name = d.consumer_name AND k.dead_at IS NOT NULL)
	FROM {schema}.consumer_definitions d JOIN {schema}.consumer_offsets o USING (consumer_name)
	WHERE $1::text = '' OR d.consumer_name = $1::text ORDER BY d.consumer_name, o.partition_key`

// List returns the consumers by name, or the one of a name.
func (t *Tables) List(ctx context.Context, name string) ([]*Consumer, error) {
	rows, err := t.conn.Query(ctx, t.sql(listSQL), name)
	if err != nil {
		return nil, t.explain(err, "list consumers")
	}
	var all []*Consumer
	var c Consumer
	var p Partition
	fields := []any{
		&c.Name, &c.Stream, &c.Filters, &c.Start, &p.Key, &p.Sequence, &p.At, &p.StoredAt, &p.Epoch,
		&c.Parked, &c.DeadLetters,
	}
	_, err = pgx.ForEachRow(rows, fields, func() error {
		if len(all) == 0 || all[len(all)-1].Name != c.Name {
			next := c
			all = append(all, &next)
		}
		last := all[len(all)-1]
		last.Partitions = append(last.Partitions, p)
		return nil
	})
	if err == nil && name != "" && len(all) == 0 {
		return nil, missing(name)
	}
	if err == nil {
		err = t.findOwners(ctx, all)
	}
	if err != nil {
		return nil, t.explain(err, "list consumers")
	}
	return all, nil
}

func missing(name string) error {
	return hint.Errorf("`walpost consumers list` shows those that are there", "there is no consumer %q", name)
}

const locksSQL = `SELECT classid::bigint << 32 | objid::bigint,
		coalesce(host(a.client_addr), 'local') || ' pid ' || l.pid
	FROM pg_locks l JOIN pg_stat_activity a USING (pid)
	WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
		AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())`

// findOwners goes by the locks.
func (t *Tables) findOwners(ctx context.Context, all []*Consumer) error {
	rows, err := t.conn.Query(ctx, locksSQL)
	if err != nil {
		return err
	}
	owners := map[int64][]string{}
	var key int64
	var owner string
	_, err = pgx.ForEachRow(rows, []any{&key, &owner}, func() error {
		owners[key] = append(owners[key], owner)
		return nil
	})
	for _, c := range all {
		c.Processes = len(owners[LockKey(t.schema, c.Name, Members)])
		for i := range c.Partitions {
			c.Partitions[i].Owner = strings.Join(owners[LockKey(t.schema, c.Name, c.Partitions[i].Key)], ", ")
		}
	}
	return err
}

// Rewind says where a consumer is to go on.
type Rewind struct {
	Name string
	// Sequence is the first one that is read again.
	Sequence uint64
	// Reapply forgets that events were handled which the stream stored at a time or later, and those of them
	// that failed: all are handled again. Zero is none.
	Reapply time.Time
}

const rewindSQL = `UPDATE {schema}.consumer_offsets SET epoch = epoch + 1, last_processed_id = $2,
		last_processed_at = NULL, anchor_sequence = NULL, anchor_message_id = NULL, anchor_stored_at = NULL,
		anchor_position = NULL
	WHERE consumer_name = $1 AND last_processed_id > $2`

// ErrNothingToRewind means that no partition is past the sequence.
var ErrNothingToRewind = errors.New("no partition is past it")

// Rewind moves the partitions that are past the sequence back, and raises their epochs: transactions of their
// owners that are under way are not committed, and the owners begin again there. It returns how many ids were
// forgotten.
func (t *Tables) Rewind(ctx context.Context, r Rewind) (partitions, ids int64, err error) {
	if _, err := t.List(ctx, r.Name); err != nil {
		return 0, 0, err
	}
	err = pgx.BeginFunc(ctx, t.conn, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, t.sql(rewindSQL), r.Name, int64(r.Sequence)-1)
		if partitions = tag.RowsAffected(); err != nil {
			return err
		}
		if partitions == 0 {
			return hint.Wrap(ErrNothingToRewind, "`walpost consumers list "+r.Name+"` shows the sequences")
		}
		if r.Reapply.IsZero() {
			return nil
		}
		tag, err = tx.Exec(ctx, t.sql(`DELETE FROM {schema}.consumer_seen
			WHERE consumer_name = $1 AND stored_at >= $2`), r.Name, r.Reapply.Truncate(time.Microsecond))
		if ids = tag.RowsAffected(); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, t.sql(`DELETE FROM {schema}.consumer_parked
			WHERE consumer_name = $1 AND sequence >= $2`), r.Name, int64(r.Sequence))
		return err
	})
	if err != nil {
		err = t.explain(err, "rewind consumer %s to sequence %d", r.Name, r.Sequence)
	}
	return partitions, ids, err
}
