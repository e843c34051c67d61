package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// fault breaks something and mends it.
type fault struct {
	name string
	// of is what it is about: two faults of one thing do not come together.
	of string
	// able tells whether the world can have it, now.
	able func(*world) bool
	do   func(context.Context, *world, *rand.Rand) error
}

const (
	ofRelay    = "relay"
	ofPostgres = "PostgreSQL"
	ofBroker   = "NATS"
	ofTable    = "table"
	ofLinks    = "links"
)

func always(*world) bool      { return true }
func oneBroker(w *world) bool { return w.cluster == nil }
func clustered(w *world) bool { return w.cluster != nil }
func streams(w *world) bool   { return w.mode != "poll" }

// settledServers: what was committed there, or stored, is not taken back.
func settledServers(w *world) bool { return !w.rollback && (w.replica == nil || w.promoted.Load()) }

var faults = []fault{
	{"relay killed", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).down(func() { pause(ctx, between(rng, 0, 2*time.Second)) })
	}},
	{"relay frozen", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).frozen(func() { pause(ctx, between(rng, 100*time.Millisecond, 14*time.Second)) })
	}},
	{"relay stopped", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).stopped(func() { pause(ctx, between(rng, 0, 2*time.Second)) })
	}},
	{"relay clock set", ofRelay, always, setClock},
	{"PostgreSQL crashed", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.restartPostgres(ctx, rng, testenv.Immediate)
	}},
	{"PostgreSQL restarted", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.restartPostgres(ctx, rng, testenv.Fast)
	}},
	{"standby promoted", ofPostgres, func(w *world) bool { return w.replica != nil && !w.promoted.Load() }, promote},
	{"walsender terminated", ofPostgres, streams, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.some(ctx, `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active`, slotName)
	}},
	{"sessions terminated", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.some(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'walpost%'`)
	}},
	{"slot dropped", ofPostgres, streams, func(ctx context.Context, w *world, rng *rand.Rand) error { return dropSlot(ctx, w) }},
	{"slot invalidated", ofPostgres, streams, invalidateSlot},
	{"table altered", ofTable, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.lockedTable(ctx, func(tx pgx.Tx) error {
			w.columns++
			column := fmt.Sprintf("ADD COLUMN more%d int DEFAULT 7", w.columns)
			_, err := tx.Exec(ctx, `ALTER TABLE outbox_messages `+column+`; ALTER TABLE history `+column)
			pause(ctx, between(rng, 100*time.Millisecond, 4*time.Second))
			return err
		})
	}},
	{"rows locked", ofTable, always, lockRows},
	{"ids reused", ofTable, settledServers, truncate},
	{"NATS killed", ofBroker, oneBroker, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[0]
		if err := n.Kill(); err != nil {
			return err
		}
		pause(ctx, between(rng, 0, 3*time.Second))
		return n.Start(ctx)
	}},
	{"NATS frozen", ofBroker, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[rng.IntN(len(w.brokers))]
		if err := n.Pause(); err != nil {
			return err
		}
		pause(ctx, between(rng, 100*time.Millisecond, 8*time.Second))
		return n.Resume()
	}},
	{"NATS restarted", ofBroker, oneBroker, func(ctx context.Context, w *world, rng *rand.Rand) error { return w.brokers[0].Restart(ctx) }},
	{"store rolled back", ofBroker, func(w *world) bool { return w.rollback }, rollBack},
	{"NATS node killed", ofBroker, clustered, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[rng.IntN(len(w.brokers))]
		if err := n.Kill(); err != nil {
			return err
		}
		pause(ctx, between(rng, 0, 5*time.Second))
		return n.Start(ctx)
	}},
	{"NATS leader stepped down", ofBroker, clustered, func(ctx context.Context, w *world, rng *rand.Rand) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		reply, err := w.nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+streamName, nil)
		if err != nil || bytes.Contains(reply.Data, []byte(`"error"`)) {
			return errors.Join(errNotNow, err)
		}
		return nil
	}},
	{"NATS cluster down", ofBroker, clustered, func(ctx context.Context, w *world, rng *rand.Rand) error {
		for _, n := range w.brokers {
			if err := n.Kill(); err != nil {
				return err
			}
		}
		pause(ctx, between(rng, 0, 3*time.Second))
		for _, n := range w.brokers {
			if err := n.Start(ctx); err != nil {
				return err
			}
		}
		return nil
	}},
	{"stream full", ofBroker, always, fill},
	{"message deleted", ofTable, settledServers, deleteMessage},
	{"links cut", ofLinks, always, links(func(p *testenv.Proxy) { p.Cut() }, 5*time.Second)},
	{"links dropped", ofLinks, always, links(func(p *testenv.Proxy) { p.Drop() }, 0)},
	{"links half open", ofLinks, always, links(func(p *testenv.Proxy) { p.Pause() }, 14*time.Second)},
	{"links slow", ofLinks, always, links(func(p *testenv.Proxy) { p.Slow(20 * time.Millisecond) }, 5*time.Second)},
}

// setClock has a relay believe in another time, from then on: seconds or weeks away.
func setClock(ctx context.Context, w *world, rng *rand.Rand) error {
	by := time.Duration(math.Exp(rng.Float64()*14) * float64(time.Second))
	if rng.IntN(2) == 0 {
		by = -by
	}
	return w.anyRelay(rng).setClock(by)
}

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
	hash := outboxTable.HashSQL("t")
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	locked, err := tx.Exec(ctx, `SELECT FROM outbox_messages t WHERE id = $1 AND processed_at IS NOT NULL AND `+hash+` = $2 FOR UPDATE`, id.ID, int64(id.Hash))
	if err != nil || !own || locked.RowsAffected() == 0 {
		return errors.Join(errNotNow, err, tx.Rollback(ctx))
	}
	if err := s.DeleteMsg(short, m.Sequence); err != nil {
		err := w.until(ctx, "a message is deleted", func(ctx context.Context) error { // and may have been before
			err := s.DeleteMsg(ctx, m.Sequence)
			if errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				return nil
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	again := `UPDATE outbox_messages t SET processed_at = NULL, last_error = 'held: delivered again' WHERE id = $1 AND ` + hash + ` = $2`
	if _, err = tx.Exec(ctx, again, id.ID, int64(id.Hash)); err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		err = w.until(ctx, "a row whose message was deleted is pending", func(ctx context.Context) error { return w.exec(ctx, again, id.ID, int64(id.Hash)) })
	}
	w.deleted.Store(key(id), m.Sequence)
	return err
}

// between draws from a range of durations, short ones as often as long ones.
func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	x := rng.Float64()
	return least + time.Duration(x*x*float64(most-least))
}

func (w *world) anyRelay(rng *rand.Rand) *relay { return w.relays[rng.IntN(len(w.relays))] }

// down kills the relay and keeps it down.
func (r *relay) down(meanwhile func()) error {
	r.up.Lock()
	defer r.up.Unlock()
	err := r.life.Kill()
	meanwhile()
	return err
}

func (r *relay) stopped(meanwhile func()) error {
	r.up.Lock()
	defer r.up.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.life.Stop(ctx); err != nil {
		r.stuck.Store(true)
		return err
	}
	meanwhile()
	return nil
}

func (r *relay) frozen(meanwhile func()) error {
	r.up.Lock()
	life := r.life
	r.up.Unlock()
	if err := life.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	meanwhile()
	_ = life.Signal(syscall.SIGCONT)
	select {
	case <-life.Done():
		return errNotNow // it had ended by itself
	default:
		return nil
	}
}

func (w *world) restartPostgres(ctx context.Context, rng *rand.Rand, mode testenv.StopMode) error {
	s := w.server()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := s.Stop(ctx, mode); err != nil {
		return err
	}
	pause(ctx, between(rng, 0, 2*time.Second))
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
	pause(ctx, by)
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

func dropSlot(ctx context.Context, w *world) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		err := w.exec(ctx, `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active`, slotName)
		if err == nil {
			err = w.some(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1`, slotName)
		}
		if err == nil || errors.Is(err, errNotNow) || !pause(ctx, 20*time.Millisecond) {
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
		err = errors.Join(err, s.Reload(context.WithoutCancel(ctx), map[string]string{"max_slot_wal_keep_size": "1GB"}))
	}()
	const terminate = `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '` + slotName + `' AND active`
	for range 20 {
		for _, sql := range []string{terminate, `SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)) FROM generate_series(1, 40)`, `SELECT pg_switch_wal()`} {
			if err := w.exec(ctx, sql); err != nil {
				return err
			}
		}
		// Not the standby's slot, which would have to be built anew.
		for behind := true; behind; {
			err := w.query(ctx, `SELECT coalesce(bool_or(restart_lsn < pg_current_wal_lsn() - 4000000), false) FROM pg_replication_slots WHERE slot_type = 'physical'`, nil, &behind)
			if err == nil {
				err = w.exec(ctx, terminate)
			}
			if err != nil {
				return err
			}
			if behind && !pause(ctx, 20*time.Millisecond) {
				return errNotNow
			}
		}
		if err := w.exec(ctx, `CHECKPOINT`); err != nil {
			return err
		}
		var lost bool
		err := w.query(ctx, `SELECT coalesce(bool_or(wal_status = 'lost'), false) FROM pg_replication_slots WHERE slot_name = $1`, []any{slotName}, &lost)
		if err != nil || lost {
			return err
		}
	}
	return errNotNow
}

// lockedTable has the outbox in ACCESS EXCLUSIVE mode.
func (w *world) lockedTable(ctx context.Context, do func(pgx.Tx) error) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '10s'; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE`); err != nil {
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
		locked, err := tx.Exec(ctx, `SELECT FROM outbox_messages WHERE processed_at IS NULL ORDER BY random() LIMIT 20 FOR UPDATE SKIP LOCKED`)
		if err == nil && locked.RowsAffected() == 0 {
			return errNotNow
		}
		if err == nil {
			pause(ctx, between(rng, 100*time.Millisecond, 7*time.Second))
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
			if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&pending); err != nil {
				return err
			}
			if pending && !pause(ctx, 20*time.Millisecond) {
				return errNotNow
			}
		}
		_, err := tx.Exec(ctx, `INSERT INTO history SELECT * FROM outbox_messages; TRUNCATE outbox_messages RESTART IDENTITY`)
		return err
	})
}

// rollBack restores the broker's store to what it was some time ago.
func rollBack(ctx context.Context, w *world, rng *rand.Rand) error {
	n := w.brokers[0]
	old := filepath.Join(w.dir, "store")
	if err := os.RemoveAll(old); err != nil {
		return err
	}
	if err := n.Stop(ctx); err != nil {
		return err
	}
	if err := n.SnapshotStore(old); err != nil {
		return err
	}
	if err := n.Start(ctx); err != nil {
		return err
	}
	pause(ctx, between(rng, 500*time.Millisecond, 4*time.Second))
	w.lossy.Store(true)
	if err := n.Kill(); err != nil {
		return err
	}
	if err := n.RestoreStore(old); err != nil {
		return err
	}
	return n.Start(ctx)
}

// fill leaves the stream no more room than for some messages.
func fill(ctx context.Context, w *world, rng *rand.Rand) error {
	limit := func(most func(jetstream.StreamState) int64) error {
		return w.until(ctx, "the stream's limit is changed", func(ctx context.Context) error {
			s, err := w.js.Stream(ctx, streamName)
			if err != nil {
				return err
			}
			cfg := s.CachedInfo().Config
			cfg.MaxBytes = most(s.CachedInfo().State)
			_, err = w.js.UpdateStream(ctx, cfg)
			return err
		})
	}
	err := limit(func(s jetstream.StreamState) int64 { return int64(s.Bytes) + 50_000 })
	pause(ctx, between(rng, 500*time.Millisecond, 5*time.Second))
	if again := limit(func(jetstream.StreamState) int64 { return -1 }); again != nil {
		return again
	}
	return err
}

// links breaks the ways to PostgreSQL, to NATS, or both.
func links(how func(*testenv.Proxy), most time.Duration) func(context.Context, *world, *rand.Rand) error {
	return func(ctx context.Context, w *world, rng *rand.Rand) error {
		which := [][]*testenv.Proxy{w.pgProxies, w.natsProxies, slices.Concat(w.pgProxies, w.natsProxies)}[rng.IntN(3)]
		for _, p := range which {
			how(p)
		}
		pause(ctx, between(rng, 0, most))
		for _, p := range which {
			p.Resume()
		}
		return nil
	}
}

var errNotNow = errors.New("not now")

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

var outboxTable = &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}

// breaking breaks things until there were enough faults, and returns when all is
// mended.
type breaking struct {
	w      *world
	rng    *rand.Rand
	only   []string
	result *result
	mu     sync.Mutex
	after  bool // a fault before was not recovered from yet
}

func (b *breaking) run(ctx context.Context, least int) error {
	for n := 0; n < least && ctx.Err() == nil; {
		picked := b.pick()
		if len(picked) == 0 {
			return fmt.Errorf("no fault of %q can be had", strings.Join(b.only, ","))
		}
		var all sync.WaitGroup
		var done []string
		var failed error
		for _, f := range picked {
			rng := rand.New(rand.NewPCG(b.rng.Uint64(), 0))
			delay := between(rng, 0, time.Second)
			all.Go(func() {
				if len(picked) > 1 {
					pause(ctx, delay)
				}
				b.w.log("%s", f.name)
				err := f.do(ctx, b.w, rng)
				b.mu.Lock()
				defer b.mu.Unlock()
				switch {
				case err == nil:
					b.result.Faults[f.name]++
					done = append(done, f.name)
					n++
				case !errors.Is(err, errNotNow) && mends(f):
					failed = fmt.Errorf("%s: %w", f.name, err)
				default:
					b.w.log("%s: not this time: %v", f.name, err)
				}
			})
		}
		all.Wait()
		if failed != nil {
			return failed
		}
		if len(picked) > 1 && b.rng.IntN(2) == 0 {
			b.after = true
			pause(ctx, between(b.rng, 0, time.Second))
			continue // the next ones come while it recovers
		}
		if len(picked) > 1 || b.after {
			done = nil // whose recovery it was, nobody can tell
		}
		if err := b.recovered(ctx, done); err != nil {
			return err
		}
		b.after = false
		pause(ctx, between(b.rng, 0, 500*time.Millisecond))
	}
	return nil
}

// mends reports whether a fault that fails leaves something broken.
func mends(f fault) bool {
	return f.of == ofBroker || strings.HasPrefix(f.name, "PostgreSQL ") || f.name == "standby promoted"
}

// pick draws one fault, or two of different things.
func (b *breaking) pick() (picked []fault) {
	able := slices.DeleteFunc(slices.Clone(faults), func(f fault) bool {
		return !f.able(b.w) || len(b.only) > 0 && !slices.Contains(b.only, f.name)
	})
	if len(able) == 0 {
		return nil
	}
	picked = append(picked, able[b.rng.IntN(len(able))])
	if other := able[b.rng.IntN(len(able))]; b.rng.IntN(2) == 0 && other.of != picked[0].of {
		picked = append(picked, other)
	}
	return picked
}

// recovered waits until what is committed now is stored and marked, but for delayed
// and failed rows.
func (b *breaking) recovered(ctx context.Context, after []string) error {
	begun := time.Now()
	var last int64
	err := b.w.until(ctx, "the database answers", func(ctx context.Context) error {
		return b.w.query(ctx, `SELECT coalesce(max(id), 0) FROM outbox_messages`, nil, &last)
	})
	if err != nil {
		return err
	}
	err = b.w.until(ctx, "what was committed is delivered", func(ctx context.Context) error {
		var left int
		err := b.w.query(ctx, `SELECT count(*)::int FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NULL AND available_at < now() AND id <= $1`, []any{last}, &left)
		if err == nil && left > 0 {
			return fmt.Errorf("%d rows are pending", left)
		}
		return err
	})
	if err == nil && len(after) == 1 {
		b.result.Recoveries[after[0]] = append(b.result.Recoveries[after[0]], time.Since(begun))
	}
	if err == nil {
		b.w.lossy.Store(false)
	}
	return err
}
