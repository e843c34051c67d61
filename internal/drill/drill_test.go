package drill_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
)

// TestSlotLost: the relay recreates the slot, and the report is what an independent count says.
func TestSlotLost(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		o := r.drill("slot-lost")
		r.fine(o)
		if text := fmt.Sprint(o.Steps); !strings.Contains(text, "dropped slot "+r.db) {
			t.Errorf("steps %q", text)
		}
	})
}

// TestRelayKilled: a supervisor starts the relay again.
func TestRelayKilled(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		first := r.relay
		x := r.begin("relay-killed", "--json", "--yes", "--for", "4s", "--pid", fmt.Sprint(r.pid()))
		<-first.Done()
		r.start()
		r.fine(r.await(x))

		x = r.begin("relay-killed", "--json", "--yes", "--for", "4s", "--kill", fmt.Sprintf("kill -9 %d", r.pid()))
		<-r.relay.Done()
		r.start()
		if o := r.await(x); o.code != 0 || !o.OK {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}

// TestRelayDoesNotComeBack: what is pending is not lost, and the drill does not wait for ever.
func TestRelayDoesNotComeBack(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		o := r.drill("relay-killed", "--pid", fmt.Sprint(r.pid()), "--patience", "8s")
		if o.code != 1 || o.OK || o.Recovered || o.Lost != 0 || o.Events.Pending == 0 || o.Again != nil {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
		if e := o.Events; e.Committed != e.Stored+e.Pending {
			t.Errorf("%d events, %d stored, %d pending", e.Committed, e.Stored, e.Pending)
		}
	})
}

// TestNATSRestart: the command is the operator's.
func TestNATSRestart(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		command, asked := r.commandOf(func(ctx context.Context) error { return r.nats.Restart(ctx) })
		o := r.drill("nats-restart", "--restart", command)
		r.must(<-asked)
		r.fine(o)
	})
}

// TestNATSStaysDown: what was not stored waits, and the drill ends.
func TestNATSStaysDown(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		command, asked := r.commandOf(func(context.Context) error { return r.nats.Kill() })
		o := r.drill("nats-restart", "--restart", command, "--patience", "4s")
		r.must(<-asked)
		if o.code != 1 || o.OK || o.Recovered || !o.Incomplete || o.Lost != 0 || o.Events.Pending == 0 || o.Events.Stored == 0 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}

// commandOf is a shell command that has this test do something, and ends when it is done.
func (r *rig) commandOf(do func(context.Context) error) (command string, done <-chan error) {
	asked, answered := filepath.Join(r.dir, "asked"), filepath.Join(r.dir, "answered")
	result := make(chan error, 1)
	go func() {
		err := r.awaitFile("asked")
		if err == nil {
			err = do(r.t.Context())
		}
		result <- err
		_ = os.WriteFile(answered, nil, 0o600)
	}()
	return fmt.Sprintf("touch %s; while [ ! -e %s ]; do sleep 0.05; done", asked, answered), result
}

func (r *rig) awaitFile(name string) error {
	for {
		if _, err := os.Stat(filepath.Join(r.dir, name)); err == nil {
			return nil
		}
		if !sleep.For(r.t.Context(), 20*time.Millisecond) {
			return r.t.Context().Err()
		}
	}
}

// TestOwnTraffic: with --rate 0 the drill writes nothing, and watches what the system writes.
func TestOwnTraffic(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		stop := make(chan struct{})
		written := make(chan error, 1)
		go func() {
			var err error
			for err == nil {
				select {
				case <-stop:
					written <- nil
					return
				case <-time.After(20 * time.Millisecond):
				}
				err = r.try(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{}')`)
			}
			written <- err
		}()
		o := r.drill("slot-lost", "--rate", "0")
		close(stop)
		r.must(<-written)
		if o.code != 0 || !o.OK || o.Again == nil || o.Outbox != "" || o.Events.Committed != 0 || o.Verify.Messages == 0 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}

// TestInterrupted: the report says what was done and counted so far.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		r.allow()
		r.start()
		x := r.begin("slot-lost", "--json", "--yes", "--for", "10m")
		r.stored(100)
		r.must(x.cmd.Process.Signal(syscall.SIGINT))
		o := r.await(x)
		if o.code != 1 || o.OK || !o.EndedEarly || o.Injected != nil || o.Verify != nil || o.Events.Stored < 100 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
		if !strings.Contains(o.stderr, "error: the drill was interrupted") {
			t.Errorf("it says %q", o.stderr)
		}

		x = r.begin("nats-restart", "--yes", "--json", "--for", "2s", "--restart", "touch "+filepath.Join(r.dir, "begun")+"; exec sleep 600")
		r.must(r.awaitFile("begun"))
		r.must(x.cmd.Process.Signal(syscall.SIGINT))
		o = r.await(x)
		if o.code != 1 || !o.EndedEarly || o.Injected == nil || len(o.Steps) != 1 || !strings.HasPrefix(o.Steps[0].Text, "began --restart: touch ") {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}
