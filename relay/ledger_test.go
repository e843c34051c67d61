package relay_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// ledger is a load whose outcome can be told from the database alone: every
// account has a counter, and each event of the account says what it was counted
// up to. A writer locks the account by counting, before it inserts. So when
// everything is delivered the stream holds, for every account, exactly the
// numbers from 1 to the counter, in this order, whatever became of the writers.
type ledger struct {
	rig      *rig
	accounts int
}

// load is what a writer does until it is stopped.
type load struct {
	writers int
	rows    int           // most rows in a transaction
	padding int           // bytes in every payload
	pause   time.Duration // after each transaction
	ahead   int           // due rows that writers leave a relay, about; 0: mostAhead
}

// mostAhead is how many due rows writers leave a relay, about, before they wait.
const mostAhead = 3000

func newLedger(r *rig) *ledger {
	r.t.Helper()
	l := &ledger{rig: r, accounts: 16}
	r.exec(fmt.Sprintf(`CREATE TABLE ledger (id bigint PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
		INSERT INTO ledger SELECT g FROM generate_series(1, %d) g`, l.accounts))
	return l
}

const moveSQL = `WITH account AS (UPDATE ledger SET n = n + $2 WHERE id = $1 RETURNING n)
	INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
	SELECT 1, 'account', $1, 'account.moved', jsonb_build_object('pad', repeat('x', $3)), g
	FROM account, generate_series(account.n - $2 + 1, account.n) g ORDER BY g`

// move commits one transaction.
func (l *ledger) move(ctx context.Context, c *pgx.Conn, rows, padding int) error {
	_, err := c.Exec(ctx, moveSQL, 1+rand.IntN(l.accounts), rows, padding)
	return err
}

// start writes until the returned function is called, which waits for the
// writers.
func (l *ledger) start(w load) (stop func()) {
	var enough atomic.Bool
	if w.ahead == 0 {
		w.ahead = mostAhead
	}
	unwatch := l.each(1, func(ctx context.Context, c *pgx.Conn) error {
		var yes bool
		err := c.QueryRow(ctx, testenv.AheadSQL, w.ahead).Scan(&yes)
		enough.Store(yes)
		sleepUntil(ctx, 200*time.Millisecond)
		return err
	})
	unwrite := l.each(w.writers, func(ctx context.Context, c *pgx.Conn) error {
		err := l.move(ctx, c, 1+rand.IntN(w.rows), w.padding)
		sleepUntil(ctx, w.pause)
		for enough.Load() && ctx.Err() == nil {
			sleepUntil(ctx, 20*time.Millisecond)
		}
		return err
	})
	return func() { unwrite(); unwatch() }
}

// each has writers repeat what write does. A writer that loses its connection
// makes a new one.
func (l *ledger) each(writers int, write func(context.Context, *pgx.Conn) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var writing sync.WaitGroup
	for range writers {
		writing.Go(func() {
			for ctx.Err() == nil {
				l.repeat(ctx, write)
				sleepUntil(ctx, 20*time.Millisecond)
			}
		})
	}
	stop = sync.OnceFunc(func() {
		cancel()
		writing.Wait()
	})
	l.rig.t.Cleanup(stop)
	return stop
}

// repeat returns at the first error.
func (l *ledger) repeat(ctx context.Context, write func(context.Context, *pgx.Conn) error) {
	c, err := pgx.Connect(ctx, l.rig.url)
	if err != nil {
		return
	}
	defer c.Close(context.Background())
	for ctx.Err() == nil && write(ctx, c) == nil {
	}
}

func sleepUntil(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// committed is the number of events that the stream has to hold in the end.
func (l *ledger) committed() int {
	l.rig.t.Helper()
	n, err := strconv.Atoi(l.rig.query1(`SELECT sum(n)::bigint FROM ledger`))
	l.rig.must(err)
	return n
}

// reaches waits until so many events are committed, as long as there are more and
// more of them.
func (l *ledger) reaches(events int) {
	l.rig.t.Helper()
	for n := l.committed(); n < events; {
		before := n
		eventually(l.rig.t, "more events are committed", func() bool { n = l.committed(); return n > before })
	}
}

// delivered waits until every committed event is marked, as long as more of them
// are, and compares the stream with the ledger. Writers must have ended.
func (l *ledger) delivered() {
	l.rig.t.Helper()
	l.deliveredBut("")
}

func (l *ledger) deliveredBut(eventType string) {
	l.rig.t.Helper()
	l.ended()
	for left := l.rig.unmarked(); left > 0; {
		before := left
		eventually(l.rig.t, "more rows are marked", func() bool { left = l.rig.unmarked(); return left < before })
	}
	l.compareBut(eventType)
}

// ended waits for the statements of writers that were stopped: such a writer has left its statement to the
// server, which may still commit.
func (l *ledger) ended() {
	l.rig.t.Helper()
	eventually(l.rig.t, "no writer's statement is under way", func() bool {
		return l.rig.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
			AND application_name = '' AND state = 'active' AND pid <> pg_backend_pid()`) == 0
	})
}

// compare fails the test where the stream is not the ledger.
func (l *ledger) compare() { l.compareBut("") }

// compareBut does not ask for the place of events of one type, each of which has to
// be there once all the same.
func (l *ledger) compareBut(eventType string) {
	l.rig.t.Helper()
	want := l.committed()
	last, apart := map[string]int{}, map[string]int{}
	got, faults := 0, 0
	eachHeader(l.rig.t, l.rig.nats.URL(), "EVENTS", func(seq uint64, h nats.Header) {
		got++
		if eventType != "" && h.Get("ce-type") == eventType {
			if event := h.Get("ce-aggregateid") + "/" + h.Get("ce-traceid"); apart[event] > 0 {
				l.rig.t.Errorf("message %d: event %s is message %d already", seq, event, apart[event])
			} else {
				apart[event] = int(seq)
			}
			return
		}
		account := h.Get("ce-aggregateid")
		n, err := strconv.Atoi(h.Get("ce-traceid"))
		next := last[account] + 1
		for eventType != "" && next < n { // whether they are there the count tells
			next++
		}
		if err != nil || n != next {
			if faults++; faults <= 10 {
				l.rig.t.Errorf("message %d: event %q of account %s follows event %d (%s at %s, via %q)", seq, h.Get("ce-traceid"), account, last[account],
					h.Get("ce-type"), h.Get("Walpost-Position"), h.Get("Walpost-Via"))
			}
		}
		last[account] = n
	})
	if got != want || faults > 0 {
		l.rig.t.Fatalf("the stream holds %d events, want %d; %d are not where they belong", got, want, faults)
	}
}

// eachHeader reads the headers of a whole stream, in order.
func eachHeader(t *testing.T, url, name string, each func(seq uint64, h nats.Header)) {
	t.Helper()
	nc := testenv.ConnectNATS(t, url)
	defer nc.Close()
	js := testenv.JetStream(t, nc)
	s, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if s.CachedInfo().State.Msgs == 0 {
		return
	}
	c, err := s.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{HeadersOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	messages, err := c.Messages(jetstream.PullMaxMessages(10_000))
	if err != nil {
		t.Fatal(err)
	}
	defer messages.Stop()
	for {
		m, err := messages.Next(jetstream.NextContext(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			t.Fatal(err)
		}
		each(meta.Sequence.Stream, m.Headers())
		if meta.NumPending == 0 {
			return
		}
	}
}
