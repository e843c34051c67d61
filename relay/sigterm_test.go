package relay_test

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// SIGTERM under load, in the middle of a backlog: the relay takes nothing more,
// waits for what is on its way, marks and confirms it, and ends with exit code 0.
// What is stored is then marked, what is marked is confirmed, and the next start
// sends nothing again.
func TestTerminateUnderLoad(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		r.launch().awaitState("streaming").terminate() // makes the slot: what is committed before is not in its WAL
		const left = 2000                              // rows that are still to be sent then
		for shown, backlog := 0, 3*left; shown < testenv.Size(t, 2, 4); {
			stop := l.start(load{writers: 4, rows: 50, pause: 10 * time.Millisecond, ahead: 2 * backlog})
			eventually(t, "a backlog comes together", func() bool { return r.unmarked() >= backlog })
			before := r.storedCount()
			p := r.launch()
			eventually(t, "events are stored", func() bool { return r.storedCount() > before+1000 })
			begun := time.Now()
			p.terminate()
			took, n := time.Since(begun).Round(time.Millisecond), r.unmarked()
			stop()
			t.Logf("ended %s after SIGTERM, with %d rows left", took, n)
			r.nothingInDoubt()
			if n >= left {
				shown++
			} else {
				backlog *= 2 // the relay was faster than the signal
			}
		}
		p := r.launch()
		l.delivered()
		p.terminate()
		p = r.launch().awaitState("streaming")
		r.passes(r.here()) // so it has been through the whole WAL
		l.compare()
		p.terminate()
	})
}

// TestTerminateWhileServersHang: neither a JetStream that does not answer nor a statement
// that never ends keeps a relay much longer than the ten seconds that it drains.
func TestTerminateWhileServersHang(t *testing.T) {
	t.Parallel()
	for _, hangs := range []string{"JetStream", "the mark", "both"} {
		t.Run(hangs, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			p := r.launch().awaitState("streaming")
			r.put(1, 100)
			r.pending(0)
			pid, n := 0, 100
			if hangs != "JetStream" {
				t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
				eventually(t, "rows are stored that cannot be marked", func() bool {
					pid = r.pid(`SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
					r.must(syscall.Kill(pid, syscall.SIGSTOP))
					r.put(n+1, n+100)
					n += 100
					for range 500 {
						if r.storedCount() == uint64(n) {
							return true
						}
						time.Sleep(20 * time.Millisecond)
					}
					// The server has described the table again, as it does after ANALYZE, say, and the relay asks how it
					// is published.
					r.must(syscall.Kill(pid, syscall.SIGCONT))
					r.pending(0)
					return false
				})
			}
			if hangs != "the mark" {
				r.must(r.nats.Pause())
				r.put(n+1, n+100)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			if err := p.prog.Stop(ctx); err != nil || p.prog.Err() != nil {
				t.Errorf("twice as long as it drains after SIGTERM: %v, %v", err, p.prog.Err())
			}
			r.must(r.nats.Resume())
			if pid != 0 {
				r.must(syscall.Kill(pid, syscall.SIGCONT))
			}
			r.put(n+101, n+200)
			r.launch()
			r.pending(0)
			last := r.count(`SELECT max((payload ->> 'n')::int) FROM outbox_messages`)
			if got := r.numbers(); len(got) != r.count(`SELECT count(*) FROM outbox_messages`) || got[len(got)-1] != last || !slices.IsSorted(got) {
				t.Errorf("stored %s", brief(got))
			}
		})
	}
}

// TestTerminateWhileALockIsAskedFor: a relay that stands by has nothing to wait for, whatever the server does.
func TestTerminateWhileALockIsAskedFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.launch().awaitState("streaming")
	p := r.launch().awaitState("standby")
	pid := r.pid(`SELECT pid FROM pg_stat_activity a WHERE datname = current_database() AND query LIKE 'SELECT pg_try_advisory_lock%'
		AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND locktype = 'advisory')`)
	r.must(syscall.Kill(pid, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	time.Sleep(2 * time.Second) // for the next time that it asks
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := p.prog.Stop(ctx); err != nil || p.prog.Err() != nil {
		t.Errorf("twice as long as a relay drains after SIGTERM: %v, %v", err, p.prog.Err())
	}
}

// nothingInDoubt looks at a database whose relay has ended well: the stream
// holds just the marked rows, and the slot brings none of them again, unless the
// relay ended between two rows of their transaction.
func (r *rig) nothingInDoubt() {
	r.t.Helper()
	var marked uint64
	c := r.conn()
	r.must(c.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`).Scan(&marked))
	if stored := r.storedCount(); stored != marked {
		r.t.Errorf("%d messages are stored, %d rows are marked", stored, marked)
	}
	eventually(r.t, "the walsender has gone", func() bool { return r.walsenders() == "0" })
	rows, err := c.Query(r.t.Context(), `SELECT data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', 'walpost')`, r.cfg.Slot)
	r.must(err)
	changes, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	r.must(err)
	var first outbox.LSN // the commit of the first transaction with events
	var ids []string
	d := decode.New(r.cfg.Outboxes, nil)
	for _, data := range changes {
		m, err := d.Decode(data)
		r.must(err)
		if m.Kind != decode.Row {
			continue
		}
		if first == 0 {
			first = m.Event.Commit
		}
		if m.Event.Commit != first {
			ids = append(ids, string(m.Event.Values[outbox.ID]))
		}
	}
	var again int
	r.must(c.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE id = ANY($1::text[]::bigint[]) AND processed_at IS NOT NULL`, ids).Scan(&again))
	r.t.Logf("%d rows are stored and marked; the slot has %d more", marked, len(ids))
	if again > 0 {
		r.t.Errorf("%d rows are marked and not confirmed", again)
	}
}
