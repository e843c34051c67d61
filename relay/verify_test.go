package relay_test

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/stream"
	"github.com/walpost/walpost/verify"
)

// verify compares the rig's outboxes with its stream.
func (r *rig) verify(change ...func(*verify.Config)) *verify.Report {
	r.t.Helper()
	report, err := r.tryVerify(change...)
	r.must(err)
	return report
}

func (r *rig) tryVerify(change ...func(*verify.Config)) (*verify.Report, error) {
	r.t.Helper()
	slots, err := stream.OpenSlots(r.t.Context(), pg.Config{URL: r.url})
	r.must(err)
	defer slots.Close()
	sys, err := slots.System(r.t.Context())
	r.must(err)
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{Name: "EVENTS", Pattern: "events.*"})
	r.must(err)
	var tables []*outbox.Table
	for _, t := range r.cfg.Outboxes { // the relay's own
		own := *t
		tables = append(tables, &own)
	}
	cfg := verify.Config{
		Postgres: table.Config{URL: r.url, Settings: stream.Settings}, Slot: r.cfg.Slot, Outboxes: tables,
		Stream: s, Source: relay.DefaultSource(sys.ID, sys.Database), Phantom: sys.Phantom,
		DelayThreshold: r.cfg.DelayThreshold, FallbackInterval: r.cfg.FallbackInterval,
		Own: relay.Form{
			Source: cmp.Or(r.cfg.Source, relay.DefaultSource(sys.ID, sys.Database)), Stream: "EVENTS",
			Subject: r.cfg.Subject, Format: r.cfg.Format,
		}.Own,
	}
	for _, f := range change {
		f(&cfg)
	}
	return verify.Run(r.t.Context(), cfg)
}

func repair(c *verify.Config) { c.Repair = true }

// finds wants so many cases of some kinds, and none of the others.
func (r *rig) finds(report *verify.Report, want map[verify.Kind]int64) {
	r.t.Helper()
	for _, k := range verify.Kinds {
		if f := report.Found[k]; f.Count != want[k] {
			r.t.Errorf("%d %s, want %d: %+v", f.Count, k, want[k], f.Examples)
		}
	}
}

// again publishes a copy of a message, as the relay would have.
func (r *rig) again(m *natsjs.RawStreamMsg, change func(nats.Header)) {
	r.t.Helper()
	h := nats.Header{}
	for name, values := range m.Header {
		if !strings.HasPrefix(name, "Nats-Expected") {
			h[name] = values
		}
	}
	if change != nil {
		change(h)
	}
	ack, err := r.js().PublishMsg(r.t.Context(), &nats.Msg{Subject: m.Subject, Header: h, Data: m.Data})
	r.must(err)
	if ack.Duplicate {
		r.t.Fatal("it was taken for a duplicate: the test shows nothing")
	}
}

func (r *rig) loseMessages(seqs ...uint64) {
	r.t.Helper()
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	for _, seq := range seqs {
		r.must(s.DeleteMsg(r.t.Context(), seq))
	}
}

// verified is a rig with 100 delivered events and a stopped relay.
func verified(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	x := r.start().streaming()
	r.put(1, 100)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.duplicateWindowPasses(200 * time.Millisecond)
	return r
}

// TestVerifyFindsWhatIsWrong plants each fault, and wants it found and nothing else.
func TestVerifyFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		plant func(r *rig)
		want  map[verify.Kind]int64
	}{
		"nothing":             {func(*rig) {}, nil},
		"lost messages":       {func(r *rig) { r.loseMessages(3, 99, 100) }, map[verify.Kind]int64{verify.Missing: 3}},
		"the stream is empty": {func(r *rig) { s, _ := r.js().Stream(r.t.Context(), "EVENTS"); r.must(s.Purge(r.t.Context())) }, map[verify.Kind]int64{verify.Missing: 100}},
		"a row marked by hand": {func(r *rig) {
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', 1, 'order.placed', '{}', now())`)
		}, map[verify.Kind]int64{verify.Missing: 1}},
		"a duplicate at the end": {func(r *rig) { r.again(r.stored()[99], nil) }, map[verify.Kind]int64{verify.Duplicated: 1}},
		"a swap": {func(r *rig) {
			all := r.stored()
			r.loseMessages(99, 100)
			r.again(all[99], nil)
			r.again(all[98], nil)
		}, map[verify.Kind]int64{verify.Reordered: 1}},
		"a message without a row": {func(r *rig) {
			r.again(r.stored()[99], func(h nats.Header) {
				id := h.Get(nats.MsgIdHdr)
				h.Set(nats.MsgIdHdr, id[:len(id)-4]+"0000")
			})
		}, map[verify.Kind]int64{verify.Unknown: 1}},
		"a deleted row": {func(r *rig) { r.exec(`DELETE FROM outbox_messages WHERE payload ->> 'n' = '7'`) }, map[verify.Kind]int64{verify.Unknown: 1}},
		"a changed row": {func(r *rig) {
			r.exec(`UPDATE outbox_messages SET event_type = 'order.changed' WHERE payload ->> 'n' = '7'`)
		}, map[verify.Kind]int64{verify.Unknown: 1, verify.Missing: 1}},
		"a phantom": {func(r *rig) {
			m := r.stored()[99]
			r.loseMessages(100)
			r.exec(`DELETE FROM outbox_messages WHERE payload ->> 'n' = '100'`)
			r.again(m, func(h nats.Header) {
				p := strings.Split(h.Get(jetstream.PositionHeader), "/")
				p[1] = "99"
				h.Set(jetstream.PositionHeader, strings.Join(p, "/"))
			})
		}, map[verify.Kind]int64{verify.Phantom: 1}},
		"another writer": {func(r *rig) {
			_, err := r.js().Publish(r.t.Context(), "events.other", []byte("{}"))
			r.must(err)
		}, nil},
		"dead letters": {func(r *rig) {
			r.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id) VALUES ('public.outbox_messages', '4711')`)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := verified(t)
			c.plant(r)
			report := r.verify()
			r.finds(report, c.want)
			if report.Rows+report.Messages == 0 {
				t.Errorf("nothing was compared: %+v", report)
			}
		})
	}
}

// TestVerifyRepairs: what is missing is delivered again by the running relay, also
// where it was archived.
func TestVerifyRepairs(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.cfg.FallbackInterval = 200 * time.Millisecond
	r.archive(50)
	x := r.start().streaming() // only a start looks for losses itself
	r.loseMessages(10, 20, 60, 70)
	r.finds(r.verify(), map[verify.Kind]int64{verify.Missing: 4})
	r.finds(r.verify(func(c *verify.Config) { c.Since = time.Now().Add(-time.Hour) }), map[verify.Kind]int64{verify.Missing: 2})
	report := r.verify(repair)
	r.finds(report, map[verify.Kind]int64{verify.Missing: 4})
	if report.Repaired != 4 {
		t.Errorf("%d rows were repaired, want 4", report.Repaired)
	}
	eventually(t, "all is marked", func() bool { return r.unmarked() == 0 })
	r.finds(r.verify(), nil)
	if n := len(r.stored()); n != 100 {
		t.Errorf("the stream holds %d messages, want 100", n)
	}
	x.quiet("missed_rows", "events_lost")
}

// TestVerifyProvesPendingRows: a pending row is missing when the WAL is past it, and
// not before.
func TestVerifyProvesPendingRows(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.cfg.FallbackInterval = time.Hour
	r.put(101, 105)
	r.exec(`UPDATE outbox_messages SET available_at = now() - interval '2 hours', occurred_at = now() - interval '3 hours' WHERE payload ->> 'n' = '101'`)
	report := r.verify()
	r.finds(report, nil)
	if report.Pending != 5 || !strings.Contains(fmt.Sprint(report.Notes), "nobody streams slot") {
		t.Errorf("report %+v", report)
	}
	// A first pass of the poller finds them, unless they are delayed ones until it is over:
	// when it counts the one that is due.
	r.exec(`UPDATE outbox_messages SET available_at = now() + interval '1 hour' WHERE processed_at IS NULL`)
	r.put(106, 106)
	r.exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, r.cfg.Slot)
	x := r.start().streaming()
	eventually(t, "the first pass is over", func() bool { return x.metric("walpost_missed_rows_total") == 1 && r.unmarked() == 5 })
	r.exec(`UPDATE outbox_messages SET available_at = now(), occurred_at = now() WHERE processed_at IS NULL`)
	r.finds(r.verify(), map[verify.Kind]int64{verify.Missing: 5})
	// Those that were meant for later are the table's, which has the relay's pause for them and a minute.
	r.exec(`UPDATE outbox_messages SET available_at = now() - interval '2 hours', occurred_at = now() - interval '3 hours' WHERE (payload ->> 'n')::int IN (101, 102)`)
	r.exec(`UPDATE outbox_messages SET available_at = now() - interval '30 minutes', occurred_at = now() - interval '3 hours' WHERE payload ->> 'n' = '103'`)
	r.finds(r.verify(), map[verify.Kind]int64{verify.Missing: 4})
	r.finds(r.verify(func(c *verify.Config) { c.DelayThreshold = 3 * time.Hour }), map[verify.Kind]int64{verify.Missing: 5})
	x.quiet("events_lost")
}

// TestVerifyBesideALoad: a relay at work looks wrong at no time.
func TestVerifyBesideALoad(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Retention = relay.Retention{ArchiveAfter: 2 * time.Second, Interval: time.Second}
	l := newLedger(r)
	x := r.start().streaming()
	stop := l.start(load{writers: 2, rows: 10, pause: 30 * time.Millisecond})
	r.exec(remindSQL, 1, 200, 1.1, 8)
	compared := int64(0)
	for n := range 6 {
		report := r.verify(func(c *verify.Config) {
			if n%2 == 1 {
				c.Since = time.Now().Add(-2 * time.Second)
			}
		})
		r.finds(report, nil)
		compared += report.Rows
		if n == 3 {
			x.halt()
			x = r.start().streaming()
		}
		time.Sleep(500 * time.Millisecond)
	}
	stop()
	eventually(t, "all is marked", func() bool { return r.unmarked() == 0 })
	report := r.verify()
	r.finds(report, nil)
	// A row that is archived meanwhile is looked for twice.
	if want := int64(l.committed() + 200); report.Rows < want || report.Messages != want || compared == 0 {
		t.Errorf("compared %d rows with %d messages, want %d", report.Rows, report.Messages, want)
	}
}

// TestVerifyWithoutMarks: where delivered rows are gone, duplicates and order are
// all that can be told.
func TestVerifyWithoutMarks(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	r.cfg.Outboxes[0].Mark = outbox.MarkDelete
	x := r.start().streaming()
	r.put(1, 100)
	eventually(t, "all rows are gone", func() bool { return r.count(`SELECT count(*) FROM outbox_messages`) == 0 })
	x.halt()
	r.duplicateWindowPasses(200 * time.Millisecond)
	r.finds(r.verify(), nil)
	r.again(r.stored()[50], nil)
	r.finds(r.verify(), map[verify.Kind]int64{verify.Duplicated: 1})
}
