package consume

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/walpost/walpost/outbox"
)

// statementTimeout bounds the statements around a handler.
const statementTimeout = 10 * time.Second

// tables replaces the names of walpost's tables in a statement. Names resolve on the application's
// search_path. Every function and operator takes exactly the types that it is declared with in pg_catalog, so
// that none in another schema is a better match.
func (c *consumer) sql(text string) string {
	schema := outbox.QuoteIdent(c.Schema) + "."
	return strings.NewReplacer(
		"{offsets}", schema+"consumer_offsets", "{definitions}", schema+"consumer_definitions",
		"{seen}", schema+"consumer_seen", "{parked}", schema+"consumer_parked").Replace(text)
}

// errFenced means that another process has the partition, or that it was rewound.
var errFenced = errors.New("the partition belongs to another process")

// errMoved means that the partition's offset is not the one that this process knows: a commit without a reply
// succeeded.
var errMoved = errors.New("the partition's offset has moved")

// claim is a transaction that holds the lock of its partition's row.
type claim struct {
	txn
	*partition
	xid  string
	seen map[string]bool // of the ids that were asked for
}

// begin locks the partition's row and looks up which of the ids were handled. Both happen on one snapshot:
// where the statement waited for another transaction of the partition, the offset or the epoch has changed,
// and the ids are not used.
//
// A server that loses its client ends the transaction within half a second.
func (p *partition) begin(ctx context.Context, ids []string) (c *claim, err error) {
	begin, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	tx, err := p.handler.begin(begin)
	if err != nil {
		return nil, fmt.Errorf("begin transaction: %w", err)
	}
	c = &claim{txn: tx, partition: p}
	if err = c.lock(begin, ids); err != nil {
		tx.end()
		return nil, fmt.Errorf("lock the offset of partition %d: %w", p.key, err)
	}
	return c, nil
}

const claimSQL = `SELECT o.epoch, o.last_processed_id, pg_catalog.pg_current_xact_id()::text,
		ARRAY(SELECT s.id FROM {seen} s WHERE s.id = ANY ($3::text::uuid[]))::text,
		pg_catalog.set_config('idle_in_transaction_session_timeout', $4::text, true),
		pg_catalog.set_config('client_connection_check_interval', $5::text, true)
	FROM {offsets} o WHERE o.consumer_name = $1::text AND o.partition_key = $2::integer FOR UPDATE OF o`

func (c *claim) lock(ctx context.Context, ids []string) error {
	var epoch, offset int64
	var seen, none string
	idle := c.Timeout + statementTimeout
	args := []any{c.Name, c.key, array(ids), milliseconds(idle), c.liveness}
	err := one(ctx, c.txn, c.sql(claimSQL), args, &epoch, &offset, &c.xid, &seen, &none, &none)
	switch {
	case errors.Is(err, errNoRow), err == nil && epoch != c.epoch:
		return errFenced
	case err != nil:
		return err
	case uint64(offset) != c.offset:
		return errMoved
	}
	c.seen = map[string]bool{}
	for _, id := range strings.FieldsFunc(strings.Trim(seen, "{}"), func(r rune) bool { return r == ',' }) {
		c.seen[strings.ReplaceAll(id, "-", "")] = true
	}
	return nil
}

// advanceSQL is the last statement before a commit. It has no row where the transaction does not own the
// partition any more, or is not the one that was begun: a handler ended that.
const advanceSQL = `WITH seen AS (
		INSERT INTO {seen} (id, consumer_name, stored_at)
		SELECT u.id, $1::text, u.at
		FROM ROWS FROM (pg_catalog.unnest($11::text::uuid[]), pg_catalog.unnest($12::text::timestamptz[]))
			AS u (id, at)
		ON CONFLICT DO NOTHING)
	UPDATE {offsets} o SET last_processed_id = $6::bigint, last_processed_at = pg_catalog.now(),
		anchor_sequence = coalesce($7::bigint, o.anchor_sequence),
		anchor_message_id = CASE WHEN $7::bigint IS NULL THEN o.anchor_message_id ELSE $8::text END,
		anchor_stored_at = coalesce($9::text::timestamptz, o.anchor_stored_at),
		anchor_position = CASE WHEN $7::bigint IS NULL THEN o.anchor_position ELSE $10::text END
	WHERE o.consumer_name = $1::text AND o.partition_key = $2::integer
		AND o.epoch = $3::bigint AND o.last_processed_id = $4::bigint
		AND pg_catalog.pg_current_xact_id()::text = $5::text
	RETURNING o.partition_key`

// step is what one transaction settles.
type step struct {
	offset uint64
	anchor anchor // none: the partition keeps its own
	ids    []string
	times  []string
}

// finish writes the offset and the ids, and commits. It does not end with ctx: the work is done.
func (c *claim) finish(ctx context.Context, s step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statementTimeout)
	defer cancel()
	if err := c.usable(); err != nil {
		return err
	}
	args := []any{
		c.Name, c.key, c.epoch, int64(c.offset), c.xid, int64(s.offset),
		nil, nil, nil, nil, array(s.ids), array(s.times),
	}
	if a := s.anchor; a.seq > 0 {
		args[6], args[7], args[8], args[9] = int64(a.seq), a.id, timeText(a.at), a.position
	}
	var key int
	err := one(ctx, c.txn, c.sql(advanceSQL), args, &key)
	switch {
	case errors.Is(err, errNoRow): // the row is locked, so the transaction is another one
		return errEnded
	case err != nil:
		return fmt.Errorf("write the offset: %w", err)
	}
	if err := c.commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	c.offset = s.offset
	return nil
}

// errNoRow means that a statement returned no row.
var errNoRow = errors.New("no row")

// one reads a statement's first row.
func one(ctx context.Context, t txn, sql string, args []any, dest ...any) error {
	found := false
	err := t.query(ctx, sql, args, func(scan func(...any) error) error {
		if found {
			return nil
		}
		found = true
		return scan(dest...)
	})
	if err == nil && !found {
		err = errNoRow
	}
	return err
}

// array is the text of an array whose values need no quotes.
func array(values []string) string { return "{" + strings.Join(values, ",") + "}" }

// timeText keeps the microseconds that PostgreSQL keeps, and does not round.
func timeText(at time.Time) string {
	return at.UTC().Truncate(time.Microsecond).Format("2006-01-02T15:04:05.000000Z")
}
