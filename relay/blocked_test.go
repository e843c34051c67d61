package relay_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestBlockedReader: a locked row stops the publisher, and the reader with it, for
// longer than the server bears a silent relay. The server hears of it.
func TestBlockedReader(t *testing.T) {
	t.Parallel()
	// A cluster of its own: while a transaction is open no slot can be created.
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.start().streaming().halt()
	r.put(1, 1)
	holder := r.forgotten(1)
	x := r.start().streaming()
	r.put(2, jetstream.U+1000)
	r.pending(1001)
	seen := r.watchWalsender()
	time.Sleep(12 * time.Second)
	seen().lively(t)
	if n := x.metric("walpost_sessions_total"); n != 0 {
		t.Errorf("%v sessions have ended", n)
	}
	r.must(run(t.Context(), holder, "ROLLBACK"))
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, jetstream.U+1000)
}

// TestShutdownWhileASendIsStuck: JetStream is silent, the socket to it is full,
// and the NATS client waits for it with its lock held. The replication connection
// ends all the same when the server shuts down.
func TestShutdownWhileASendIsStuck(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	r.start().streaming()
	r.must(r.nats.Pause())
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n, 'pad', repeat('x', 42000)) FROM generate_series(1, 1000) n ORDER BY n`)
	time.Sleep(6 * time.Second) // the relay has given up on the PubAcks; the client gives up after 10 s
	walsender := r.pid(`SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	lock := r.pid(`SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted`)
	stopped := make(chan error, 1)
	go func() { stopped <- r.pg.Stop(t.Context(), testenv.Fast) }()
	gone := func(pid int) func() bool { return func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH } }
	eventually(t, "the session with the lock is gone", gone(lock))
	begun := time.Now()
	eventually(t, "the walsender is gone", gone(walsender))
	took := time.Since(begun)
	t.Logf("the walsender goes %s after the lock", took.Round(time.Millisecond))
	if took > 2500*time.Millisecond {
		t.Errorf("the replication connection holds the server up for %s", took)
	}
	r.must(<-stopped)
	r.must(r.pg.Start(t.Context()))
	r.must(r.nats.Resume())
	r.pending(0)
	r.storedIs(1, 1000)
}
