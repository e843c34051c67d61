package relay_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestUnmarkedRowsAreFoundInTheStream: rows that were stored, but not marked when
// the relay crashed, and whose WAL comes again when the duplicate window is long
// over, are found behind whatever lies in the stream after them.
func TestUnmarkedRowsAreFoundInTheStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		behind int
		id     func(last string, i int) string
		alarm  string
	}{
		{"at its end", 0, nil, ""},
		{"behind foreign messages", jetstream.U + 100, func(string, int) string { return "" }, "foreign_message"},
		{"behind phantoms", jetstream.U + 100, func(last string, i int) string { return sibling(last, 1000+i) }, "phantoms"},
		{"behind replays", jetstream.U - 30, func(last string, i int) string { return fmt.Sprintf("%s/replay-%d", last, i) }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			r.keep()
			r.put(1, 30)
			r.pending(0)
			x.halt()
			r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE (payload ->> 'n')::int > 10`)
			r.rewind()
			last := r.stored()[29].Header
			r.publish(c.behind, func(i int, h nats.Header) {
				h.Set(nats.MsgIdHdr, c.id(last.Get(nats.MsgIdHdr), i))
				position, err := outbox.ParsePosition(last.Get(jetstream.PositionHeader))
				r.must(err)
				h.Set("ce-source", "crm")
				if position.N = uint32(i); c.alarm == "phantoms" {
					position.Timeline, position.Commit = 7, position.Commit+1<<40
				}
				h.Set(jetstream.PositionHeader, position.String())
			})
			r.duplicateWindowPasses(100 * time.Millisecond)

			x = r.start().streaming()
			r.put(31, 40)
			r.pending(0)
			r.passes(r.here())
			if got := slices.DeleteFunc(r.numbers(), func(n int) bool { return n == 0 }); !slices.Equal(got, span(1, 40)) {
				t.Errorf("stored %s, want 1-40", brief(got))
			}
			if c.alarm != "" {
				x.alarmed(c.alarm)
			}
			if f := x.alarm(c.alarm); c.alarm == "foreign_message" && (f["writer"] != "crm" || f["hint"] == "" || f["sequence"] == 0) {
				t.Errorf("the alarm says %v", f)
			}
			x.quietBut()
		})
	}
}

// sibling is the message id of another row.
func sibling(id string, row int) string {
	parts := strings.Split(id, "/")
	parts[len(parts)-2] = strconv.Itoa(row)
	return strings.Join(parts, "/")
}

// publish stores messages whose number is 0 at the stream's end.
func (r *rig) publish(n int, header func(i int, h nats.Header)) {
	r.t.Helper()
	js := r.js()
	for i := range n {
		m := &nats.Msg{Subject: "events.order.placed", Header: nats.Header{}, Data: []byte(`{"n": 0}`)}
		header(i+1, m.Header)
		if i%2000 < 1999 && i < n-1 {
			r.must(js.Conn().PublishMsg(m))
			continue
		}
		_, err := js.PublishMsg(r.t.Context(), m) // JetStream answers when those before it are stored, too
		r.must(err)
	}
}

// duplicateWindowPasses returns when a stream with that window has forgotten a
// message that is stored now.
func (r *rig) duplicateWindowPasses(window time.Duration) {
	r.t.Helper()
	js := r.js()
	_, err := js.CreateStream(r.t.Context(), natsjs.StreamConfig{Name: "PROBE", Subjects: []string{"probe"}, Duplicates: window})
	r.must(err)
	ack, err := js.Publish(r.t.Context(), "probe", nil, natsjs.WithMsgID("probe"))
	r.must(err)
	eventually(r.t, "the duplicate window passes", func() bool {
		ack, err = js.Publish(r.t.Context(), "probe", nil, natsjs.WithMsgID("probe"))
		r.must(err)
		return !ack.Duplicate
	})
}

// TestEverythingMarkedBehindReplays: messages that were sent again on purpose say
// nothing about when rows were marked.
func TestEverythingMarkedBehindReplays(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 30)
	r.pending(0)
	x.halt()
	last := r.stored()[29].Header
	r.publish(jetstream.U, func(i int, h nats.Header) {
		h.Set(nats.MsgIdHdr, fmt.Sprintf("%s/replay-%d", last.Get(nats.MsgIdHdr), i))
		h.Set(jetstream.PositionHeader, last.Get(jetstream.PositionHeader))
	})
	x = r.start().streaming()
	r.put(31, 31)
	r.pending(0)
	x.quiet("events_lost", "foreign_message")
}

// TestPositionsMarkNothing: a row that lies below the stream's last position and
// is not in the stream was refused and not recorded when the relay crashed. It
// goes out in its turn, or is recorded; it is never taken for stored.
func TestPositionsMarkNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.OnPoison = fallback.Skip
	r.createStream(func(c *natsjs.StreamConfig) { c.Subjects = []string{"events.order.>"} })
	x := r.start().streaming()
	r.keep()
	row := func(n int, eventType string) string {
		return set{"event_type": "'" + eventType + "'"}.insert("outbox_messages", n, canonicalRow)
	}
	r.exec(row(4, "payment.made") + ";" + row(1, "order.placed"))
	r.exec(row(5, "payment.made"))
	r.exec(row(6, "never.covered"))
	r.exec(row(2, "order.placed") + ";" + row(7, "never.covered") + ";" + row(3, "order.placed"))
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 3)
	x.halt()

	// Two rows of either kind were not recorded before the crash.
	r.exec(`UPDATE outbox_messages SET attempts = 0, last_error = NULL, available_at = occurred_at WHERE payload ->> 'n' IN ('4', '5', '7')`)
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = append(cfg.Subjects, "events.payment.>")
	_, err = r.js().UpdateStream(t.Context(), cfg)
	r.must(err)
	r.rewind()
	r.start().streaming()
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 5)
	if parked := r.query1(`SELECT string_agg(payload ->> 'n', ' ' ORDER BY id) FROM outbox_messages WHERE processed_at IS NULL AND attempts = 1`); parked != "6 7" {
		t.Errorf("parked are %s, want 6 and 7, each with one attempt", parked)
	}
}

// TestOrdinalsCountEveryTable: a position does not depend on which tables the relay is told to read. Rows of
// a table that it reads from now on come with the newest position: positions never go back.
func TestOrdinalsCountEveryTable(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	r.exec(`CREATE TABLE audit (LIKE outbox_messages INCLUDING ALL)`)
	r.exec(`CREATE PUBLICATION walpost FOR TABLE audit, outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`)
	table := func(name string) *outbox.Table {
		return &outbox.Table{Schema: "public", Name: name, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	}
	commit := func(n int) {
		r.exec(set.insert(nil, "audit", 100, canonicalRow) + ";" + set.insert(nil, "outbox_messages", n, canonicalRow) + ";" +
			set.insert(nil, "audit", 100, canonicalRow) + ";" + set.insert(nil, "outbox_messages", n+1, canonicalRow))
	}
	next := 1
	for _, tables := range [][]*outbox.Table{
		{table("outbox_messages")},
		{table("audit"), table("outbox_messages")},
		{table("outbox_messages")},
	} {
		r.cfg.Outboxes = tables
		x := r.start().streaming()
		if next == 1 {
			r.keep()
		}
		r.joined(len(tables))
		commit(next)
		next += 2
		r.passes(r.here())
		x.halt()
		r.rewind()
		r.duplicateWindowPasses(100 * time.Millisecond)
		r.must(r.js().DeleteStream(t.Context(), "PROBE"))
	}
	r.start().streaming()
	r.passes(r.here())

	var got []string
	for _, m := range r.stored() {
		p, err := outbox.ParsePosition(m.Header.Get(jetstream.PositionHeader))
		r.must(err)
		got = append(got, fmt.Sprintf("%d:%d", numbersOf(t, []*natsjs.RawStreamMsg{m})[0], p.N))
	}
	if want := "1:2 2:4 100:4 100:4 100:1 3:2 100:3 4:4 5:2 6:4"; strings.Join(got, " ") != want {
		t.Errorf("stored (number:ordinal) %s, want %s", strings.Join(got, " "), want)
	}
}

// TestFalseDuplicate: JetStream answers "duplicate" for a message that it no
// longer has. The event is not there, so the row is not marked; it is tried again
// when the answer would be another.
func TestFalseDuplicate(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.OnPoison = fallback.Skip
	x := r.start().streaming()
	r.keep()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	cfg.Duplicates = 2 * time.Minute
	_, err = r.js().UpdateStream(t.Context(), cfg)
	r.must(err)
	r.put(1, 3)
	r.pending(0)
	x.halt()
	r.must(s.DeleteMsg(t.Context(), 2))
	r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE payload ->> 'n' = '2'`)
	r.rewind()

	x = r.start().streaming()
	x.alarmed("false_duplicate")
	r.put(4, 6)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 1, 3, 6)
	if got := r.query1(`SELECT round(extract(epoch FROM available_at - now())) BETWEEN 10 AND 120 FROM outbox_messages WHERE processed_at IS NULL`); got != "true" {
		t.Errorf("it is tried again within the duplicate window of two minutes")
	}
	if got := r.query1(`SELECT last_error FROM outbox_messages WHERE processed_at IS NULL AND attempts = 1`); !strings.HasPrefix(got, "duplicate: ") {
		t.Errorf("last_error is %q, want one of class duplicate", got)
	}
}
