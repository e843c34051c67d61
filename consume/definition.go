package consume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
)

// ErrTaken means that the consumer's name belongs to a consumer of another stream.
var ErrTaken = errors.New("the consumer's name is taken")

// definition is what all processes of a consumer agree on: its row of consumer_definitions.
type definition struct {
	stream     string
	partitions int
	filters    []string
}

func (d *definition) equal(other *definition) bool {
	return d.partitions == other.partitions && slices.Equal(d.filters, other.filters)
}

// hashName is how events are assigned to partitions: see outbox.PartitionHash.
const hashName = "fnv1a32"

const definitionSQL = `SELECT d.stream, d.partitions, d.filter_subjects, d.partition_hash
	FROM {definitions} d WHERE d.consumer_name = $1`

func (c *consumer) readDefinition(ctx context.Context, conn *pgx.Conn) (*definition, error) {
	var d definition
	var hash string
	err := conn.QueryRow(ctx, c.sql(definitionSQL), c.Name).
		Scan(&d.stream, &d.partitions, &d.filters, &hash)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil
	case pg.Code(err) == pgerrcode.UndefinedTable, pg.Code(err) == pgerrcode.UndefinedColumn,
		pg.Code(err) == pgerrcode.InvalidSchemaName:
		return nil, hint.Errorf("run: walpost migrate up --only consumer; or set Schema",
			"find walpost's tables: %w", fatal{err})
	case pg.Code(err) == pgerrcode.InsufficientPrivilege:
		return nil, hint.Errorf("grant SELECT, INSERT, UPDATE and DELETE on consumer_definitions, "+
			"consumer_offsets, consumer_seen and consumer_parked to the role",
			"read walpost's tables: %w", fatal{err})
	case err != nil:
		return nil, err
	case d.stream != c.Stream:
		return nil, hint.Errorf("choose another Name; a consumer keeps its stream",
			"%w: %q reads stream %s, not %s", fatal{ErrTaken}, c.Name, d.stream, c.Stream)
	case hash != hashName:
		return nil, hint.Errorf("update this program", "consumer %q: %w", c.Name,
			fatal{fmt.Errorf("unknown partition hash %q", hash)})
	}
	return &d, nil
}

// agree creates the definition, or changes it when no process with the old one runs. It returns with the lock
// of the members, shared: while that is held, no process changes the definition.
func (c *consumer) agree(ctx context.Context, conn *pgx.Conn) error {
	want := definition{stream: c.Stream, partitions: c.Partitions, filters: c.Filters}
	for waited := false; ; {
		joined, have, err := c.join(ctx, conn, &want)
		if err != nil || joined {
			c.definition = want
			return err
		}
		changed, err := c.change(ctx, conn, &want)
		switch {
		case err != nil:
			return err
		case changed:
			continue
		case !waited:
			waited = true
			c.Logger.WarnContext(ctx, "consumer waits until no process with another definition runs",
				"consumer", c.Name, "partitions", have.partitions, "filters", have.filters)
		}
		if !sleep.For(ctx, time.Second) {
			return ctx.Err()
		}
	}
}

// join takes the members' lock if the definition is the wanted one. It creates one that is missing.
func (c *consumer) join(ctx context.Context, conn *pgx.Conn, want *definition) (bool, *definition, error) {
	have, err := c.readDefinition(ctx, conn)
	if err == nil && have == nil {
		if err = c.create(ctx, conn); err == nil {
			have, err = c.readDefinition(ctx, conn)
		}
	}
	if err != nil {
		return false, nil, err
	}
	if have == nil || !have.equal(want) {
		return false, have, nil
	}
	key := c.lockKey(consumers.Members)
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock_shared($1)`, key); err != nil {
		return false, have, err
	}
	if have, err = c.readDefinition(ctx, conn); err == nil && have != nil && have.equal(want) {
		return true, have, nil
	}
	_, unlocked := conn.Exec(ctx, `SELECT pg_advisory_unlock_shared($1)`, key)
	return false, have, errors.Join(err, unlocked)
}

const createSQL = `WITH d AS (
		INSERT INTO {definitions}
			(consumer_name, stream, partitions, partition_hash, filter_subjects, start_at, start_sequence)
		VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING RETURNING 1)
	INSERT INTO {offsets} (consumer_name, partition_key, last_processed_id, stream_created_at)
	SELECT $1, n, $7, $8 FROM d, generate_series(0, $3::integer - 1) n`

// create makes the rows of all partitions in one statement, with one start.
func (c *consumer) create(ctx context.Context, conn *pgx.Conn) error {
	info, err := c.stream.Info(ctx)
	if err != nil {
		return err
	}
	offset := info.LastSeq
	switch at, _ := parseStart(c.Start); {
	case c.Start == startAll:
		offset = max(info.FirstSeq, 1) - 1
	case !at.IsZero():
		first, err := c.stream.SeqSince(ctx, at)
		if err != nil {
			return err
		}
		offset = first - 1
	}
	filters := append([]string{}, c.Filters...)
	_, err = conn.Exec(ctx, c.sql(createSQL), c.Name, c.Stream, c.Partitions, hashName, filters, c.Start,
		int64(offset), info.Created)
	if err != nil {
		return fmt.Errorf("create consumer %q: %w", c.Name, err)
	}
	return nil
}

// change writes the wanted definition if no other process runs, and reports whether it did.
func (c *consumer) change(ctx context.Context, conn *pgx.Conn, want *definition) (alone bool, err error) {
	key := c.lockKey(consumers.Members)
	err = conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, key).Scan(&alone)
	if err != nil || !alone {
		return false, err
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		have, err := c.readDefinition(ctx, conn)
		if err != nil || have == nil || have.equal(want) {
			return err
		}
		if have.partitions != want.partitions {
			if err := c.repartition(ctx, tx, want); err != nil {
				return err
			}
		}
		filters := append([]string{}, want.filters...)
		_, err = tx.Exec(ctx, c.sql(`UPDATE {definitions}
			SET partitions = $2, filter_subjects = $3, changed_at = now() WHERE consumer_name = $1`),
			c.Name, want.partitions, filters)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("change the definition of consumer %q: %w", c.Name, err)
	}
	_, err = conn.Exec(ctx, `SELECT pg_advisory_unlock($1)`, key)
	return true, err
}

// repartition makes the rows of the new partitions. They begin at the lowest offset of the old ones:
// consumer_seen tells which of the events behind it were handled.
func (c *consumer) repartition(ctx context.Context, tx pgx.Tx, want *definition) error {
	_, err := tx.Exec(ctx, c.sql(`WITH old AS (DELETE FROM {offsets} WHERE consumer_name = $1 RETURNING *),
		low AS (SELECT * FROM old ORDER BY last_processed_id LIMIT 1)
		INSERT INTO {offsets} (consumer_name, partition_key, last_processed_id, last_processed_at, epoch,
			anchor_sequence, anchor_message_id, anchor_stored_at, anchor_position, stream_created_at)
		SELECT $1, n, low.last_processed_id, low.last_processed_at, (SELECT max(epoch) + 1 FROM old),
			low.anchor_sequence, low.anchor_message_id, low.anchor_stored_at, low.anchor_position,
			low.stream_created_at
		FROM low, generate_series(0, $2::integer - 1) n`), c.Name, want.partitions)
	return err
}
