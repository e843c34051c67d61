package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
)

func (w *world) restartPostgres(ctx context.Context, rng *rand.Rand, mode testenv.StopMode) error {
	s := w.server()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := s.Stop(ctx, mode); err != nil {
		return err
	}
	sleep.For(ctx, between(rng, 0, 2*time.Second))
	return s.Start(ctx)
}

// promote lets the primary crash and never come back.
func promote(ctx context.Context, w *world, rng *rand.Rand) error {
	if rng.IntN(2) == 0 {
		return promoteBehind(ctx, w, between(rng, 100*time.Millisecond, 2*time.Second))
	}
	if err := w.primary.Stop(ctx, testenv.Immediate); err != nil {
		return err
	}
	return promoteNow(ctx, w)
}

// promoteBehind promotes a standby that lacks the last rows.
func promoteBehind(ctx context.Context, w *world, by time.Duration) error {
	if err := w.replica.Stop(ctx, testenv.Fast); err != nil {
		return err
	}
	sleep.For(ctx, by)
	if err := w.primary.Stop(ctx, testenv.Immediate); err != nil {
		return err
	}
	if err := w.replica.Start(ctx); err != nil {
		return err
	}
	return promoteNow(ctx, w)
}

func promoteNow(ctx context.Context, w *world) error {
	if err := w.replica.Promote(ctx); err != nil {
		return err
	}
	w.promoted.Store(true)
	if w.replica.Version() < 17 {
		return nil
	}
	// As an operator must: it has the setting from its primary, and would have every
	// walsender wait for a standby that it does not have.
	return w.replica.Reload(ctx, map[string]string{"synchronized_standby_slots": ""})
}

// terminateWalsender ends the session that uses a slot.
const terminateWalsender = `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
	WHERE slot_name = $1 AND active`

func dropSlot(ctx context.Context, w *world) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		err := w.exec(ctx, terminateWalsender, slotName)
		if err == nil {
			err = w.some(ctx, `SELECT pg_drop_replication_slot(slot_name)
				FROM pg_replication_slots WHERE slot_name = $1`, slotName)
		}
		if err == nil || errors.Is(err, errNotNow) || !sleep.For(ctx, 20*time.Millisecond) {
			return err
		}
	}
}

// invalidateSlot has the server keep less WAL than there is, while no walsender
// comes to rest.
func invalidateSlot(ctx context.Context, w *world, rng *rand.Rand) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s := w.server()
	if err := s.Reload(ctx, map[string]string{"max_slot_wal_keep_size": "16MB"}); err != nil {
		return err
	}
	defer func() {
		restored := map[string]string{"max_slot_wal_keep_size": "1GB"}
		err = errors.Join(err, s.Reload(context.WithoutCancel(ctx), restored))
	}()
	const terminate = `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
		WHERE slot_name = '` + slotName + `' AND active`
	const write = `SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))
		FROM generate_series(1, 40)`
	for range 20 {
		for _, sql := range []string{terminate, write, `SELECT pg_switch_wal()`} {
			if err := w.exec(ctx, sql); err != nil {
				return err
			}
		}
		// Not the standby's slot, which would have to be rebuilt.
		for behind := true; behind; {
			err := w.query(ctx, `SELECT coalesce(bool_or(restart_lsn < pg_current_wal_lsn() - 4000000), false)
				FROM pg_replication_slots WHERE slot_type = 'physical'`, nil, &behind)
			if err == nil {
				err = w.exec(ctx, terminate)
			}
			if err != nil {
				return err
			}
			if behind && !sleep.For(ctx, 20*time.Millisecond) {
				return errNotNow
			}
		}
		if err := w.exec(ctx, `CHECKPOINT`); err != nil {
			return err
		}
		var lost bool
		err := w.query(ctx, `SELECT coalesce(bool_or(wal_status = 'lost'), false)
			FROM pg_replication_slots WHERE slot_name = $1`, []any{slotName}, &lost)
		if err != nil || lost {
			return err
		}
	}
	return errNotNow
}

// some runs a statement that has to touch something.
func (w *world) some(ctx context.Context, sql string, args ...any) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	tag, err := conn.Exec(ctx, sql, args...)
	if err == nil && tag.RowsAffected() == 0 {
		return errNotNow
	}
	return err
}
