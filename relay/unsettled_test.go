package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestOneMarkIsRefused: a row whose mark the database refuses holds up its own
// transaction, and no other row.
func TestOneMarkIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`ALTER TABLE outbox_messages ADD CONSTRAINT kept_pending CHECK (payload ->> 'n' <> '33' OR processed_at IS NULL)`)
	x := r.start().streaming()
	r.put(1, 30)
	r.pending(0)
	r.passes(r.here())
	r.put(31, 100)
	a := x.alarmed("row_unsettled")
	id := r.query1(`SELECT id::text FROM outbox_messages WHERE payload ->> 'n' = '33'`)
	if row, err := fmt.Sprint(a["row"]), fmt.Sprint(a["error"]); !strings.Contains(row, id) || !strings.Contains(err, "kept_pending") {
		t.Errorf("alarm %v, want row %s and constraint kept_pending", a, id)
	}
	r.pending(1)
	after := r.here()
	r.put(101, 120) // later rows meet no delay either
	r.pending(1)
	r.pinned(after)
	r.storedIs(1, 120)

	r.exec(`ALTER TABLE outbox_messages DROP CONSTRAINT kept_pending`)
	r.pending(0)
	x.over("row_unsettled")
	r.passes(r.here())
	r.storedIs(1, 120)
	if n := x.metric("walpost_sessions_total"); n != 0 {
		t.Errorf("%v sessions have ended on a row that cannot be marked", n)
	}
}

// TestAttemptsAreExhausted: the column cannot count on.
func TestAttemptsAreExhausted(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.OnPoison = fallback.Skip
	x := r.start().streaming()
	bad := set{"event_type": `'order placed'`}
	full := set{"event_type": `'order placed'`, "attempts": `32767`}
	c := r.conn()
	r.must(run(t.Context(), c, "BEGIN"))
	for n, row := range []set{bad, nil, full, nil, bad} {
		r.must(run(t.Context(), c, row.insert("outbox_messages", n, canonicalRow)))
	}
	r.must(run(t.Context(), c, "COMMIT"))
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 1, 3, 3)
	parked := r.parkedRows(c)
	if len(parked) != 3 {
		t.Fatalf("%d rows are parked, want 3", len(parked))
	}
	for i, attempts := range []int{1, 32767, 1} {
		if p := parked[i]; p.Attempts != attempts || !p.BackedOff || !strings.HasPrefix(p.LastError, "subject: ") {
			t.Errorf("row %d: %+v, want %d attempts, a later available_at, and a last_error of class subject", i, p, attempts)
		}
	}
	x.quiet("row_unsettled")
}

// TestAnIDOfAnotherType: the stream holds a message of a row that the table, as
// it is now, cannot have.
func TestAnIDOfAnotherType(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.keep()
	r.put(1, 10)
	r.pending(0)
	x.halt()
	r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE payload ->> 'n' = '7'`)
	last := r.stored()[9].Header
	parts := strings.Split(last.Get(nats.MsgIdHdr), "/")
	parts[len(parts)-2] = "abc"
	r.publish(1, func(_ int, h nats.Header) {
		h.Set(nats.MsgIdHdr, strings.Join(parts, "/"))
		h.Set(jetstream.PositionHeader, last.Get(jetstream.PositionHeader))
	})
	r.rewind()
	x = r.start().streaming()
	r.put(11, 12)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 10, 0, 0, 11, 12)
	x.quietBut()
}

// TestTriggerTakesTheMarkBack, or suppresses it: the rows are stored once, and the alarm names no lock.
func TestTriggerTakesTheMarkBack(t *testing.T) {
	for _, result := range []string{"OLD", "NULL"} {
		t.Run(result, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.FallbackInterval = 100 * time.Millisecond
			r.exec(fmt.Sprintf(`CREATE FUNCTION unchanged() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN %s; END';
				CREATE TRIGGER unchanged BEFORE UPDATE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION unchanged()`, result))
			x := r.start().streaming()
			r.put(1, 3)
			x.alarmed("row_unsettled")
			r.pending(3)
			r.storedIs(1, 3)
			r.exec(`DROP TRIGGER unchanged ON outbox_messages`)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 3)
			x.quiet("row_locked", "missed_rows")
		})
	}
}
