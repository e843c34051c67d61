package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
)

// window is a duplicate window that is over before a relay is back.
const window = 100 * time.Millisecond

// restartFromKept is a crash of the server and of the relay that comes so late
// that JetStream's duplicate window is over. The table may not decide about less
// than before.
func (x *running) restartFromKept() *running {
	x.rig.t.Helper()
	before := x.tableDecidesUntil()
	x.halt()
	x.rig.duplicateWindowPasses(window)
	x.rig.rewind()
	next := x.rig.start().streaming()
	if now := next.tableDecidesUntil(); x.rig.query1(`SELECT $1::pg_lsn < $2::pg_lsn`, now, before) == "true" {
		x.rig.t.Errorf("the table decides until %s, before it was %s", now, before)
	}
	return next
}

// tableDecidesUntil is the recovery LSN of the relay's only session.
func (x *running) tableDecidesUntil() string {
	x.rig.t.Helper()
	sessions := x.logged("streaming").All()
	if len(sessions) != 1 {
		x.rig.t.Fatalf("the relay has had %d sessions, want 1", len(sessions))
	}
	return sessions[0].ContextMap()["recovery_lsn"].(string)
}

// TestAnOldRowIsTheNewestMessage: a row that is sent later than rows that were
// committed after it must not let those be sent again.
func TestAnOldRowIsTheNewestMessage(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.OnPoison = fallback.Skip
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects, c.Duplicates = []string{"events.order.>"}, window })
	x := r.start().streaming()
	r.keep()
	r.exec(set{"event_type": `'payment.made'`}.insert("outbox_messages", 1, canonicalRow))
	r.put(2, 6)
	r.pending(0)
	r.passes(r.here())
	if n := x.metric("walpost_held_aggregates"); n != 0 {
		t.Errorf("%v aggregates are held, and failed rows are skipped", n)
	}
	x.halt()
	r.storedIs(2, 6)

	// The crash has lost the record of the refusal, and the stream takes the row now.
	r.exec(`UPDATE outbox_messages SET attempts = 0, last_error = NULL, available_at = occurred_at WHERE payload ->> 'n' = '1'`)
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = append(cfg.Subjects, "events.payment.>")
	_, err = r.js().UpdateStream(t.Context(), cfg)
	r.must(err)
	r.rewind()
	x = r.start().streaming()
	r.pending(0)
	r.storedIs(2, 6, 1, 1)

	for range 2 {
		x = x.restartFromKept()
		r.passes(r.here())
		r.storedIs(2, 6, 1, 1)
	}
	r.put(7, 8)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(2, 6, 1, 1, 7, 8)
	x.restartFromKept().quietBut()
	r.passes(r.here())
	r.storedIs(2, 6, 1, 1, 7, 8)
}

// TestAnOldRowIsTheOnlyMessage: in a stream that was emptied, the first message
// is of a row that others, stored before and marked, were committed after.
func TestAnOldRowIsTheOnlyMessage(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = window })
	x := r.start().streaming()
	r.keep()
	r.put(1, 1)
	r.put(2, 6)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(t.Context()))
	r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE payload ->> 'n' = '1'`)
	r.duplicateWindowPasses(window)
	r.rewind()
	x = r.start().streaming()
	x.alarmed("nothing_to_compare")
	r.pending(0)
	r.storedIs(1, 1)

	for range 2 {
		x = x.restartFromKept()
		r.passes(r.here())
		r.storedIs(1, 1)
	}
	r.put(7, 8)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 1, 7, 8)
	x.restartFromKept()
	r.passes(r.here())
	r.storedIs(1, 1, 7, 8)
}
