package relay_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// mostMemory is what a relay may occupy, whatever it reads.
const mostMemory = 64 << 20

// TestHugeTransaction: one transaction of 25,000 or 300,000 rows, which hold more than mostMemory, and the relay killed in its middle: the
// second one finds out what is stored and goes on behind it. Neither needs more
// memory for it than for small ones, and PostgreSQL hears of both all the time.
func TestHugeTransaction(t *testing.T) {
	needsProc(t)
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	rows := uint64(testenv.Size(t, 25_000, 300_000))
	pad := testenv.Size(t, 2800, 200)
	first := r.launch().awaitState("streaming")
	idle := first.peak()
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'account', g % 1000, 'account.moved', jsonb_build_object('pad', repeat('x', $2::int)) FROM generate_series(1, $1::int) g`, rows, pad)

	committed := time.Now()
	eventually(t, "the transaction is under way", func() bool { return r.storedCount() > 0 })
	seen := r.watchWalsender()
	half := r.untilStored(rows / 2)
	seen().lively(t)
	t.Logf("first relay: memory %s idle, %s at most; %s after the commit %d messages were stored",
		mib(idle), mib(first.peak()), time.Since(committed).Round(time.Millisecond), half)
	first.bounded()
	first.kill()

	begun := time.Now()
	second := r.launch().awaitState("streaming")
	seen = r.watchWalsender()
	start := r.untilStored(half + 1)
	resumed := time.Now()
	all := r.untilStored(rows)
	rate := float64(all-start) / time.Since(resumed).Seconds()
	seen().lively(t)
	eventually(t, "every row is marked", func() bool { return r.unmarked() == 0 })
	t.Logf("second relay: goes on after %s, %.0f rows/s, memory %s at most", resumed.Sub(begun).Round(time.Millisecond), rate, mib(second.peak()))
	second.bounded()
	second.terminate()
	r.storedInOrder(int(rows))
}

// bounded fails the test where the relay has needed too much memory.
func (p *process) bounded() {
	p.t.Helper()
	if peak := p.peak(); peak > mostMemory {
		p.t.Errorf("the relay occupied %s of memory, want at most %s", mib(peak), mib(mostMemory))
	}
}

// untilStored waits for messages, as long as more of them come.
func (r *rig) untilStored(want uint64) (n uint64) {
	r.t.Helper()
	for n < want {
		before := n
		eventually(r.t, "more messages are stored", func() bool { n = r.storedCount(); return n > before })
	}
	return n
}

// unmarked is the number of rows without a mark.
func (r *rig) unmarked() int {
	r.t.Helper()
	n, err := strconv.Atoi(r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`))
	r.must(err)
	return n
}

// storedInOrder fails the test where the stream is not the rows 1 to n, each
// once and one after the other.
func (r *rig) storedInOrder(n int) {
	r.t.Helper()
	next, faults := 1, 0
	source := r.query1(`SELECT system_identifier::text || '/' || current_database() FROM pg_control_system()`)
	eachHeader(r.t, r.nats.URL(), "EVENTS", func(seq uint64, h nats.Header) {
		id, ok := outbox.ParseMessageID(source, h.Get(nats.MsgIdHdr))
		if !ok || id.ID != strconv.Itoa(next) {
			if faults++; faults <= 10 {
				r.t.Errorf("message %d is %q, want row %d", seq, h.Get(nats.MsgIdHdr), next)
			}
		}
		next++
	})
	if next-1 != n || faults > 0 {
		r.t.Fatalf("the stream holds %d messages, want %d; %d are not where they belong", next-1, n, faults)
	}
}
