package relay_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// lossAlarms are all that a relay may say of a stream that lost something.
var lossAlarms = []string{"stream_rolled_back", "stream_replaced", "stream_gone", "events_lost", "nothing_to_compare"}

// quietBut fails the test where a loss was reported that there was not.
func (x *running) quietBut(expected ...string) {
	x.rig.t.Helper()
	all := strings.Join(expected, " ")
	for _, name := range lossAlarms {
		if !strings.Contains(all, name) {
			x.quiet(name)
		}
	}
}

// backup stops NATS and copies its store. restore puts the copy in the place of
// what came after. Both start NATS again.
func (r *rig) backup() (restore func()) {
	r.t.Helper()
	copied := filepath.Join(r.t.TempDir(), "store")
	r.must(r.nats.Stop(r.t.Context()))
	r.must(r.nats.SnapshotStore(copied))
	r.must(r.nats.Start(r.t.Context()))
	return func() { // it may run beside the test, which no other goroutine may end
		r.t.Helper()
		err := r.nats.Stop(r.t.Context())
		if err == nil {
			err = r.nats.RestoreStore(copied)
		}
		if err == nil {
			err = r.nats.Start(r.t.Context())
		}
		if err != nil {
			r.t.Error(err)
		}
	}
}

// saysLost wants the loss of rows with the given numbers counted to the row.
func (r *rig) saysLost(x *running, from, to int) {
	r.t.Helper()
	a := x.alarmed("events_lost")
	ids := func(n int) string {
		return r.query1(`SELECT id::text FROM outbox_messages WHERE (payload ->> 'n')::int = $1`, n)
	}
	if a["rows"] != int64(to-from+1) || a["first_id"] != ids(from) || a["last_id"] != ids(to) {
		r.t.Errorf("alarm %v, want rows %d, first_id %s, last_id %s", a, to-from+1, ids(from), ids(to))
	}
	if n := x.metric("walpost_lost_events_total"); n != float64(to-from+1) {
		r.t.Errorf("walpost_lost_events_total is %v, want %d", n, to-from+1)
	}
}

func TestStreamIsRestoredUnderARunningRelay(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	restore := r.backup()
	r.put(41, 70)
	r.pending(0)
	x.quietBut()
	restore()

	a := x.alarmed("stream_rolled_back")
	if a["last_seq"] != uint64(40) || a["acknowledged"] != uint64(70) {
		t.Errorf("alarm %v, want last_seq 40, acknowledged 70", a)
	}
	r.saysLost(x, 41, 70)
	r.put(71, 80)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 80)
	x.quietBut("stream_rolled_back", "events_lost")
}

func TestStreamIsRestoredUnderAStoppedRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	restore := r.backup()
	r.put(41, 70)
	r.pending(0)
	x.halt()
	restore()
	r.put(71, 75) // what the WAL brings comes after what was lost
	x = r.start().streaming()
	r.saysLost(x, 41, 70)
	r.put(76, 80)
	r.pending(0)
	r.storedIs(1, 80)
	x.quietBut("events_lost")
}

// TestStreamLostUnmarkedRows: the WAL brings again what the stream has lost,
// marked or not. It has to be said all the same: consumers may know of it.
func TestStreamLostUnmarkedRows(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.keep()
	r.put(1, 40)
	r.pending(0)
	restore := r.backup()
	r.put(41, 50)
	r.pending(0)
	taker := r.seize(putSQL, "order.placed", 51, 60)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 60 })
	x.halt()
	restore()
	r.must(run(t.Context(), taker, "COMMIT"))
	r.rewind()
	x = r.start().streaming()
	r.saysLost(x, 41, 50)
	r.put(61, 65)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 65)
	x.quietBut("events_lost")
}

// TestStreamIsDeletedUnderARunningRelay deletes it, in one case with all of the
// server's files while the server is away, and then has an operator recreate it.
func TestStreamIsDeletedUnderARunningRelay(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(r *rig){
		"by its API": func(r *rig) { r.must(r.js().DeleteStream(r.t.Context(), "EVENTS")) },
		"with the disk": func(r *rig) {
			empty := testenv.NewNATS(r.t, testenv.NATSOptions{})
			copied := filepath.Join(r.t.TempDir(), "store")
			r.must(empty.Stop(r.t.Context()))
			r.must(empty.SnapshotStore(copied))
			r.must(r.nats.Stop(r.t.Context()))
			r.must(r.nats.RestoreStore(copied))
			r.must(r.nats.Start(r.t.Context()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			x := r.start().streaming()
			r.put(1, 20)
			r.pending(0)
			r.passes(r.here())
			remove(r)
			r.put(21, 30)
			after := r.here()
			x.alarmed("stream_gone")
			r.pinned(after)
			if r.streamExists() {
				t.Fatal("the relay recreated the stream")
			}
			if x.Ready() == nil {
				t.Error("the relay is ready without a stream")
			}
			r.createStream(nil)
			x.alarmed("stream_replaced")
			x.alarmed("nothing_to_compare")
			r.pending(0)
			r.passes(after)
			r.storedIs(21, 30)
			x.quietBut("stream_gone", "stream_replaced", "nothing_to_compare")
		})
	}
}

func (r *rig) streamExists() bool {
	r.t.Helper()
	names := r.js().StreamNames(r.t.Context())
	n := 0
	for range names.Name() {
		n++
	}
	r.must(names.Err())
	return n > 0
}

// TestIdleRelayNoticesItsStream: no event has to come for a relay to notice that its stream was deleted, or
// deleted and recreated.
func TestIdleRelayNoticesItsStream(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode = mode
			x := r.startAtWork()
			r.put(1, 20)
			r.pending(0)
			// See TestStreamIsReplacedUnderAnIdleRelay.
			r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
			r.must(r.js().DeleteStream(t.Context(), "EVENTS"))
			r.createStream(nil)
			x.alarmed("stream_replaced")
			x.alarmed("nothing_to_compare")
			eventually(t, "the relay is at work", func() bool { return x.Ready() == nil })
			r.must(r.js().DeleteStream(t.Context(), "EVENTS"))
			x.alarmed("stream_gone")
			if x.Ready() == nil {
				t.Error("the relay is ready without a stream")
			}
			r.createStream(nil)
			eventually(t, "the relay is at work again", func() bool { return x.Ready() == nil })
			r.put(21, 30)
			r.pending(0)
			r.storedIs(21, 30)
			x.quietBut("stream_gone", "stream_replaced", "nothing_to_compare")
		})
	}
}

// TestStreamIsReplacedUnderAnIdleRelay: the next event meets another stream.
func TestStreamIsReplacedUnderAnIdleRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 20)
	r.pending(0)
	// The server removes the directory of an account without streams some time after the last
	// one's deletion, which makes a creation fail.
	r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
	r.must(r.js().DeleteStream(t.Context(), "EVENTS"))
	r.createStream(nil)
	r.put(21, 30)
	x.alarmed("stream_replaced")
	x.alarmed("nothing_to_compare")
	r.pending(0)
	r.passes(r.here())
	r.storedIs(21, 30)
	x.quiet("rival", "foreign_message", "events_lost")
}

// TestStreamIsDeletedUnderAStoppedRelay: with marked rows it will not begin, nor
// make the stream; one that the operator makes, it takes, and says what that means.
func TestStreamIsDeletedUnderAStoppedRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 20)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.must(r.js().DeleteStream(t.Context(), "EVENTS"))
	r.put(21, 30)
	before := r.query1(`SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)

	x = r.start()
	eventually(t, "the relay gives up", func() bool {
		select {
		case <-x.done:
			return true
		default:
			return false
		}
	})
	if x.err == nil || !strings.Contains(x.err.Error(), "public.outbox_messages has rows that are marked as stored in it") {
		t.Errorf("the relay ended with %v, want an error that names the marked rows", x.err)
	}
	if r.streamExists() {
		t.Fatal("the relay recreated the stream")
	}
	if now := r.query1(`SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot); now != before {
		t.Errorf("the LSN went from %s to %s", before, now)
	}

	r.createStream(nil)
	x = r.start().streaming()
	x.alarmed("nothing_to_compare")
	r.pending(0)
	r.storedIs(21, 30)
	x.quietBut("nothing_to_compare")
}

// TestStreamIsEmptied: where no message can be read, the table decides alone,
// sequences go on where they were, and it is said that nothing can be compared.
func TestStreamIsEmptied(t *testing.T) {
	t.Parallel()
	for name, empty := range map[string]func(r *rig){
		"by a purge": func(r *rig) {
			s, err := r.js().Stream(r.t.Context(), "EVENTS")
			r.must(err)
			r.must(s.Purge(r.t.Context()))
		},
		"by max_age": func(r *rig) {
			s, err := r.js().Stream(r.t.Context(), "EVENTS")
			r.must(err)
			cfg := s.CachedInfo().Config
			cfg.MaxAge, cfg.Duplicates = 200*time.Millisecond, 100*time.Millisecond
			_, err = r.js().UpdateStream(r.t.Context(), cfg)
			r.must(err)
			eventually(r.t, "the messages have expired", func() bool { return r.storedCount() == 0 })
			cfg.MaxAge = 0
			_, err = r.js().UpdateStream(r.t.Context(), cfg)
			r.must(err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			x := r.start().streaming()
			r.keep()
			r.put(1, 20)
			r.pending(0)
			empty(r)
			r.put(21, 21) // under the running relay nothing has happened
			r.pending(0)
			x.quietBut()
			x.halt()
			r.storedIs(21, 21)
			empty(r)

			r.rewind()
			x = r.start().streaming()
			x.alarmed("nothing_to_compare")
			r.put(22, 30)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(22, 30)
			if first := r.stored()[0].Sequence; first != 22 {
				t.Errorf("the sequence went on at %d, want 22", first)
			}
			x.quietBut("nothing_to_compare")
		})
	}
}

// TestTrimmedStreamHasLostNothing: the stream drops its oldest messages, and with
// them a part of the rows that were marked together.
func TestTrimmedStreamHasLostNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	keep := jetstream.U + 100
	r.createStream(func(c *natsjs.StreamConfig) { c.MaxMsgs, c.Discard = int64(keep), natsjs.DiscardOld })
	r.cfg.Stream.AcceptWeak = true
	x := r.start().streaming()
	r.put(1, 2*jetstream.U)
	r.pending(0)
	x.halt()
	const rounds = 4
	for n := range rounds { // one of which at least has the stream end in the middle of a batch
		x = r.start().streaming()
		x.quietBut()
		r.put(2*jetstream.U+17*n+1, 2*jetstream.U+17*n+17)
		r.pending(0)
		x.halt()
	}
	last := 2*jetstream.U + rounds*17
	r.storedIs(last-keep+1, last)
}

// TestLostRowIsLocked: whoever holds it is named, and nothing passes it.
func TestLostRowIsLocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	restore := r.backup()
	r.put(41, 70)
	r.pending(0)
	x.halt()
	restore()
	c := r.conn()
	r.must(run(t.Context(), c, `BEGIN`))
	r.must(run(t.Context(), c, `SELECT FROM outbox_messages WHERE payload ->> 'n' = '50' FOR UPDATE`))
	r.put(71, 80)
	x = r.start()
	a := x.alarmed("row_locked")
	if pid := fmt.Sprint(c.PgConn().PID()); !strings.Contains(fmt.Sprint(a["holder"]), "pid "+pid+",") {
		t.Errorf("the alarm names %v, want pid %s", a["holder"], pid)
	}
	r.must(run(t.Context(), c, `COMMIT`))
	x.streaming()
	r.saysLost(x, 41, 70)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 80)
}

// TestLossIsCountedOverSessions: a session that ends while one of the lost rows is locked has said how
// many it has made pending. The next one finds them pending, and says so of the locked one.
func TestLossIsCountedOverSessions(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	restore := r.backup()
	r.put(41, 70)
	r.pending(0)
	x.halt()
	restore()
	c := r.conn()
	r.must(run(t.Context(), c, `BEGIN`))
	r.must(run(t.Context(), c, `SELECT FROM outbox_messages WHERE payload ->> 'n' = '50' FOR UPDATE`))
	x = r.start()
	x.alarmed("row_locked")
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	eventually(t, "the session has said what it has made pending", func() bool {
		return x.metric("walpost_lost_events_total") == 29
	})
	r.must(run(t.Context(), c, `COMMIT`))
	x.streaming()
	r.pending(0)
	r.passes(r.here())
	if n := x.metric("walpost_lost_events_total"); n != 30 {
		t.Errorf("walpost_lost_events_total is %v, want 30", n)
	}
	r.storedIs(1, 70)
}

// TestLostRowsWithoutRecords: where no record can say so, everything that is
// pending is delivered before the WAL is read. So it is after a session that has read the WAL
// for rows of another table that were inserted as processed.
func TestLostRowsWithoutRecords(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	columns := outbox.Canonical().Columns
	columns[outbox.Attempts], columns[outbox.LastError] = "", ""
	r.cfg.Outboxes[0].Layout = outbox.Layout{Name: "custom", Columns: columns}
	r.exec(`CREATE TABLE second_outbox (LIKE outbox_messages INCLUDING ALL)`)
	r.cfg.Outboxes = append(r.cfg.Outboxes, &outbox.Table{
		Schema: "public", Name: "second_outbox", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
	})
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	r.putSecond(9001, 9001)
	restore := r.backup()
	r.put(41, 70)
	r.pending(0)
	x.halt()
	restore()
	r.exec(set{"processed_at": "now()"}.insert("second_outbox", 9002, canonicalRow))
	r.put(71, 5000) // what the WAL brings
	x = r.start().streaming()
	r.saysLost(x, 41, 70)
	x.alarmed("inserted_marked")
	r.put(5001, 5010)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 40, 9001, 9001, 41, 5010)
	x.quiet("missed_rows")
	x.quietBut("events_lost", "inserted_marked")
}

// TestMarksBeforeTheirMessages: where all marks are from long before the messages, as where the NATS server's clock is
// ahead, nothing can be compared, and an alarm says so.
func TestMarksBeforeTheirMessages(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.exec(`UPDATE outbox_messages SET processed_at = processed_at - interval '2 hours'`)
	x = r.start().streaming()
	x.alarmed("comparison_given_up")
}
