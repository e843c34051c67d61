package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// deleteMessage has somebody delete a message and have its row delivered again, so
// soon that JetStream may still take it for a duplicate. The row has an aggregate of
// its own: it is not out of its order at the stream's end.
func deleteMessage(ctx context.Context, w *world, rng *rand.Rand) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s, err := w.js.Stream(short, streamName)
	if err != nil {
		return err
	}
	m, err := s.GetLastMsgForSubject(short, "events.account.reminded")
	if err != nil {
		return err
	}
	w.deleting.Lock()
	defer w.deleting.Unlock()
	id, own := outbox.ParseMessageID(w.source, m.Header.Get(nats.MsgIdHdr))
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	locked, err := tx.Exec(ctx, `SELECT FROM outbox_rows t WHERE id = $1 AND processed_at IS NOT NULL
		AND `+outboxTable.HashSQL("t")+` = $2`+w.lockSQL(), id.ID, int64(id.Hash))
	if err != nil || !own || locked.RowsAffected() == 0 {
		return errors.Join(errNotNow, err, tx.Rollback(ctx))
	}
	if err := s.DeleteMsg(short, m.Sequence); err != nil {
		// It may have been deleted before.
		err := w.until(ctx, "a message is deleted", func(ctx context.Context) error {
			err := s.DeleteMsg(ctx, m.Sequence)
			if errors.Is(err, jetstream.ErrMsgNotFound) ||
				errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				return nil
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	again := w.againSQL()
	if _, err = tx.Exec(ctx, again, id.ID, int64(id.Hash)); err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		pending := func(ctx context.Context) error { return w.exec(ctx, again, id.ID, int64(id.Hash)) }
		err = w.until(ctx, "a row whose message was deleted is pending", pending)
	}
	w.deleted[key(id.ID, id.Hash)] = m.Sequence
	return err
}

// lockedTable has the outbox in ACCESS EXCLUSIVE mode.
func (w *world) lockedTable(ctx context.Context, do func(pgx.Tx) error) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx,
			`SET LOCAL lock_timeout = '10s'; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE`)
		if err != nil {
			return err
		}
		return do(tx)
	})
}

func lockRows(ctx context.Context, w *world, rng *rand.Rand) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		locked, err := tx.Exec(ctx, `SELECT FROM outbox_messages WHERE id = ANY (ARRAY(
			SELECT id FROM outbox_rows WHERE processed_at IS NULL ORDER BY random() LIMIT 20))
			FOR UPDATE SKIP LOCKED`)
		if err == nil && locked.RowsAffected() == 0 {
			return errNotNow
		}
		if err == nil {
			sleep.For(ctx, between(rng, 100*time.Millisecond, 7*time.Second))
		}
		return err
	})
}

// truncate has the outbox give its ids once more. It keeps the writers out until all
// is delivered, and takes what was delivered along.
func truncate(ctx context.Context, w *world, rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(1)`); err != nil {
			return err
		}
		for pending := true; pending; {
			err := tx.QueryRow(ctx, `SELECT EXISTS (
				SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&pending)
			if err != nil {
				return err
			}
			if pending && !sleep.For(ctx, 20*time.Millisecond) {
				return errNotNow
			}
		}
		_, err := tx.Exec(ctx, `INSERT INTO history SELECT * FROM outbox_messages;
			TRUNCATE outbox_messages RESTART IDENTITY`)
		return err
	})
}
