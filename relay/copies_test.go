package relay_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/verify"
)

// copies are what another writer makes of a row's message, which a subscriber sees.
var copies = map[string]struct {
	change    func(*nats.Msg)
	bodyAlone bool
	format    publish.Format
}{
	"other subject":       {change: func(m *nats.Msg) { m.Subject = "events.junk" }},
	"other aggregate":     {change: func(m *nats.Msg) { m.Header.Set("ce-aggregateid", "9") }},
	"no aggregate":        {change: func(m *nats.Msg) { m.Header.Del("ce-aggregateid") }},
	"one header more":     {change: func(m *nats.Msg) { m.Header.Set("X-Other", "1") }},
	"one value more":      {change: func(m *nats.Msg) { m.Header.Add("ce-type", "order.paid") }},
	"other content type":  {change: func(m *nats.Msg) { m.Header.Set("content-type", "text/plain") }, bodyAlone: true},
	"second content type": {change: func(m *nats.Msg) { m.Header.Add("content-type", "text/plain") }, bodyAlone: true},
	"other payload":       {change: func(m *nats.Msg) { m.Data = []byte(`{"n": 4}`) }, bodyAlone: true},
	"structured":          {change: func(m *nats.Msg) { m.Subject = "events.junk" }, format: publish.FormatCloudEvents},
	"structured attribute": {change: func(m *nats.Msg) {
		m.Data = bytes.ReplaceAll(m.Data, []byte(`"aggregateid":"1"`), []byte(`"aggregateid":"9"`))
	}, bodyAlone: true, format: publish.FormatCloudEvents},
}

// copyMessage publishes a message again as another writer would.
func (r *rig) copyMessage(m *natsjs.RawStreamMsg, change func(*nats.Msg)) {
	r.t.Helper()
	again := &nats.Msg{Subject: m.Subject, Header: nats.Header{}, Data: m.Data}
	for name, values := range m.Header {
		if !strings.HasPrefix(name, "Nats-Expected-") && !strings.HasPrefix(name, "Nats-Batch-") {
			again.Header[name] = append([]string(nil), values...)
		}
	}
	change(again)
	ack, err := r.js().PublishMsg(r.t.Context(), again)
	r.must(err)
	if ack.Duplicate {
		r.t.Fatal("it was taken for a duplicate: the test shows nothing")
	}
}

// TestCopiesOfOthers: JetStream refuses a row or loses its message, and another writer stores one under its id that differs from the
// row's own. The row is delivered all the same, whether it is pending or marked.
func TestCopiesOfOthers(t *testing.T) {
	t.Parallel()
	for name, c := range copies {
		for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
			for _, marked := range []bool{false, true} {
				if marked && c.bodyAlone || mark == outbox.MarkJournal && !strings.HasPrefix(name, "other") {
					continue // of delivered rows, bodies are not read
				}
				t.Run(fmt.Sprintf("%s/%s/marked=%v", name, mark, marked), func(t *testing.T) {
					t.Parallel()
					r := newRig(t, testenv.SharedPostgres(t))
					r.markWith(mark)
					r.cfg.Format = c.format
					r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
					x := r.start().streaming()
					r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES
						('order', 1, 'order.placed', '{"n": 1}'), ('order', 2, 'order.placed', '{"n": 2}'), ('order', 1, 'order.placed', '{"n": 3}')`)
					r.pending(0)
					x.halt()
					all := r.stored()
					r.duplicateWindowPasses(200 * time.Millisecond)
					last := all[len(all)-1]
					r.loseMessages(last.Sequence)
					r.copyMessage(last, c.change)
					switch {
					case marked:
					case mark == outbox.MarkJournal:
						r.exec(`UPDATE outbox_journal SET ids = ids - '{[3,4)}'`)
					default:
						r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id = 3`)
					}
					if report := r.verify(); marked {
						r.finds(report, map[verify.Kind]int64{verify.Missing: 1, verify.Unknown: 1})
					}
					x = r.start()
					x.alarmed("forged_message")
					eventually(t, "the row is delivered again", func() bool {
						own := 0
						for _, m := range r.stored()[len(all)-1:] {
							if m.Subject == last.Subject && string(m.Data) == string(last.Data) && m.Header.Get("ce-aggregateid") == last.Header.Get("ce-aggregateid") && m.Sequence > last.Sequence+1 {
								own++
							}
						}
						return own == 1
					})
					r.pending(0)
					x.halt()
				})
			}
		}
	}
}

// TestForgedBeforeItsRowIsVisible: a start reads a forged message of a row that is committed and not visible yet.
func TestForgedBeforeItsRowIsVisible(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.cfg.Source = "shop"
		r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
		r.start().streaming().halt()
		r.forge("shop", 1000, 7)
		r.duplicateWindowPasses(200 * time.Millisecond)
		c := r.conn()
		r.synchronous("nosuch")
		committed := make(chan error, 1)
		go func() { committed <- run(t.Context(), c, fmt.Sprintf(knownRowSQL, 1000)) }()
		eventually(t, "the row is committed and not visible", func() bool {
			return r.query1(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`) != "0"
		})
		x := r.start()
		x.alarmed("forged_message")
		r.synchronous("")
		r.must(<-committed)
		r.pending(0)
		if n := r.storedCount(); n != 2 {
			t.Errorf("the stream has %d messages, want the forged one and the row's", n)
		}
		x.halt()
	})
}

// TestOwnMessagesUnderOtherSettings: a crash leaves rows unmarked, and the relay comes back with another subject, format or header. What
// it had stored is its own, and is not stored again.
func TestOwnMessagesUnderOtherSettings(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`ALTER TABLE outbox_messages ADD COLUMN shop TEXT DEFAULT 'x'`)
	header := func(name string) {
		r.cfg.Outboxes[0].Layout.SetHeaders([]outbox.Header{{Column: "shop", Name: name}})
	}
	header("X-Shop")
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	n := 0
	for _, change := range []func(){
		func() {},
		func() { r.cfg.Subject = "events.v2.{event_type}" },
		func() { r.cfg.Format = publish.FormatCloudEvents },
		func() { header("X-Other") },
		func() { r.cfg.Subject, r.cfg.Format = "events.{event_type}", "" },
	} {
		r.exec(`UPDATE outbox_messages SET processed_at = NULL`) // as a crash does, of which the marks are lost
		change()
		r.duplicateWindowPasses(200 * time.Millisecond)
		x := r.start().streaming()
		r.put(n+1, n+20)
		n += 20
		r.pending(0)
		if len(x.logs.FilterMessageSnippet("forged").All()) > 0 {
			t.Error("the relay takes its own messages for another writer's")
		}
		x.halt()
		if got := r.storedCount(); got != uint64(n) {
			t.Fatalf("the stream has %d messages, want %d", got, n)
		}
		r.finds(r.verify(), nil)
	}
	if got := r.query1(`SELECT jsonb_array_length(forms)::text FROM outbox_sent`); got != "5" {
		t.Errorf("%s forms are remembered, want 5", got)
	}
	// The database is restored to a time before the last settings, and rows are pending again that were stored with these.
	r.exec(`UPDATE outbox_sent SET forms = forms - -1; UPDATE outbox_messages SET processed_at = NULL`)
	x := r.start().streaming()
	r.pending(0)
	x.halt()
	if got := r.storedCount(); got != uint64(n) {
		t.Errorf("the stream has %d messages, want %d", got, n)
	}
}

// TestForgedReplay: another writer has stored a message under the id of a row's replay. The request says that the row was left out.
func TestForgedReplay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(nil)
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	r.copyMessage(r.stored()[4], func(m *nats.Msg) {
		m.Subject = "events.junk"
		m.Header.Set(nats.MsgIdHdr, m.Header.Get(nats.MsgIdHdr)+"/replay-1")
	})
	got := r.replayed(r.request(table.ReplayChoice{}))
	x.alarmed("forged_message")
	if want := "done 9 1 "; !strings.HasPrefix(got, want) {
		t.Errorf("the replay is %s, want %s", got, want)
	}
	x.halt()
}

// TestForgedPosition: another writer publishes a message of the relay's source with the position of a long time ago. What the WAL brings
// again was sent before all the same.
func TestForgedPosition(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	r.start().streaming().halt()
	r.put(1, 1)
	lock := r.conn()
	r.must(run(t.Context(), lock, `BEGIN; SELECT FROM outbox_messages FOR UPDATE`)) // so that the slot waits for it
	x := r.start()
	r.put(2, 1000)
	eventually(t, "all but the first are marked", func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == "999"
	})
	x.halt()
	r.must(run(t.Context(), lock, `ROLLBACK`))
	r.duplicateWindowPasses(200 * time.Millisecond)
	r.copyMessage(r.stored()[0], func(m *nats.Msg) {
		id := m.Header.Get(nats.MsgIdHdr)
		m.Header.Set(nats.MsgIdHdr, id[:len(id)-4]+"0000")
		at := strings.Split(m.Header.Get(jetstream.PositionHeader), "/")
		m.Header.Set(jetstream.PositionHeader, strings.Join(append(at[:5], "0", "0"), "/"))
	})
	x = r.start().streaming()
	r.pending(0)
	r.passes(r.here())
	x.halt()
	if n := r.storedCount(); n != 1001 {
		t.Errorf("the stream has %d messages, want the forged one and 1000", n)
	}
}
