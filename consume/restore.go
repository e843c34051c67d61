package consume

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/jetstream"
)

// A stream that was restored from a backup or recreated has other messages at the sequences that this
// consumer knows. Its positions are worth nothing then. The partition begins again an hour before the time of
// its last message, and consumer_seen tells which events were handled.

// overlap is how far before its last message a partition begins again: servers' clocks differ.
const overlap = time.Hour

// recognize checks that the stream is the one that a position belongs to: it was not recreated or restored to
// an older state. It is certain where the last message is there.
func (c *consumer) recognize(
	ctx context.Context, info *jetstream.StreamInfo, pos uint64, last anchor,
) (certain bool, err error) {
	if info.LastSeq < pos {
		return false, notTheStream("it ends at %d, and %d was read", info.LastSeq, pos)
	}
	if last.seq == 0 {
		return false, nil
	}
	m, err := c.stream.Message(ctx, last.seq)
	switch {
	case errors.Is(err, jetstream.ErrMessageGone):
		return false, nil // limits take messages
	case err != nil:
		return false, err
	case storable(m.ID) != last.id || timeText(m.At) != timeText(last.at):
		return false, notTheStream("message %d is another one", last.seq)
	}
	return true, nil
}

func notTheStream(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{jetstream.ErrNotTheStream}, args...)...)
}

// doubt is how long a stream may look like another one: a server that has just started or was deposed may not
// know better.
const doubt = 5 * time.Second

// sure repeats a check that finds another stream for a while.
func sure(ctx context.Context, check func(context.Context) error) error {
	for begun := time.Now(); ; {
		err := check(ctx)
		if !errors.Is(err, jetstream.ErrNotTheStream) || time.Since(begun) > doubt {
			return err
		}
		select {
		case <-time.After(doubt / 10):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// locate checks that the partition's position is one of this stream, and that nothing behind it is gone.
func (p *partition) locate(ctx context.Context, info *jetstream.StreamInfo) error {
	certain, err := p.recognize(ctx, info, p.offset, p.anchor)
	if err != nil {
		return err
	}
	if !certain && p.created != nil && timeText(*p.created) != timeText(info.Created) {
		return notTheStream("it was created at %s", info.Created.UTC().Format(time.RFC3339))
	}
	if p.begins = p.offset; info.FirstSeq > p.offset+1 {
		p.begins = info.FirstSeq - 1
		return p.gap(p.offset+1, p.begins)
	}
	return nil
}

const relocateSQL = `UPDATE {offsets} SET epoch = epoch + 1, last_processed_id = $3, stream_created_at = $4,
		anchor_sequence = NULL, anchor_message_id = NULL, anchor_stored_at = NULL, anchor_position = NULL
	WHERE consumer_name = $1 AND partition_key = $2 RETURNING epoch`

// relocate puts the partition's position into the stream that there is now.
func (p *partition) relocate(ctx context.Context, conn *pgx.Conn, why error) error {
	info, err := p.stream.Info(ctx)
	if err != nil {
		return err
	}
	first := max(info.FirstSeq, 1)
	if p.since != nil {
		if first, err = p.stream.SeqSince(ctx, p.since.Add(-overlap)); err != nil {
			return err
		}
	}
	offset := int64(first - 1)
	err = conn.QueryRow(ctx, p.sql(relocateSQL), p.Name, p.key, offset, info.Created).Scan(&p.epoch)
	if err != nil {
		return fmt.Errorf("move the offset into the present stream: %w", err)
	}
	p.Logger.WarnContext(ctx, "stream was restored or recreated: going on by time, without handled events",
		"consumer", p.Name, "partition", p.key, "reason", why, "old_sequence", p.offset, "sequence", first)
	p.offset, p.begins, p.anchor = first-1, first-1, anchor{}
	return nil
}

const (
	carePause = 10 * time.Second
	purgeMost = 20_000
)

// byIndexSQL keeps the planner from reading every id for the few that are old: it believes that a third is.
const byIndexSQL = `SELECT pg_catalog.set_config('enable_seqscan', 'off', true)`

// purgeSQL deletes ids of events that every partition is long past. The time is the stream's: a consumer that
// was down for a month forgets nothing.
const purgeSQL = `WITH past AS (
		SELECT pg_catalog.min(o.anchor_stored_at) - $2::text::interval AS at FROM {offsets} o
		WHERE o.consumer_name = $1::text HAVING pg_catalog.bool_and(o.anchor_stored_at IS NOT NULL)),
	gone AS (
		DELETE FROM {seen} s WHERE s.ctid = ANY (ARRAY(SELECT old.ctid FROM {seen} old
			WHERE old.consumer_name = $1::text AND old.stored_at < (SELECT past.at FROM past)
			LIMIT $3::bigint))
		RETURNING 1)
	SELECT pg_catalog.count(*) FROM gone`

const countSQL = `SELECT pg_catalog.count(*) FILTER (WHERE k.dead_at IS NULL), pg_catalog.count(k.dead_at)
	FROM {parked} k WHERE k.consumer_name = $1::text`

// care is done by the owner of partition 0: it deletes a batch of ids, and counts parked events. Where the
// batch is full, the next turn deletes the next one. Where it fails, events go on.
func (p *partition) care(ctx context.Context) {
	if p.key != 0 || time.Since(p.cared) < carePause {
		return
	}
	var deleted int
	var parked, dead float64
	err := p.look(ctx, func(ctx context.Context, t txn) error {
		var off string
		if err := one(ctx, t, byIndexSQL, nil, &off); err != nil {
			return err
		}
		args := []any{p.Name, interval(p.Seen), purgeMost}
		if err := one(ctx, t, p.sql(purgeSQL), args, &deleted); err != nil {
			return err
		}
		if err := one(ctx, t, p.sql(countSQL), []any{p.Name}, &parked, &dead); err != nil {
			return err
		}
		return t.commit(ctx)
	})
	if ctx.Err() == nil {
		p.waits.set("delete ids of handled events", err)
	}
	if err == nil {
		p.metrics.parked.Set(parked)
		p.metrics.dead.Set(dead)
	}
	if err != nil || deleted < purgeMost {
		p.cared = time.Now()
	}
}
