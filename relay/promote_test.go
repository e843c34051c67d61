package relay_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestPromotionUnderLoad: the primary crashes under load, and a standby takes its
// place that had fallen behind and has no copy of the slot: it lacks rows that are
// stored, and marks of rows that it has. What the new primary has committed is in
// the stream, once and in order, beside what the old one had and lost.
func TestPromotionUnderLoad(t *testing.T) {
	t.Parallel()
	for _, mark := range testenv.Some(t, 1, outbox.MarkUpdate, outbox.MarkJournal) {
		t.Run(string(mark), func(t *testing.T) {
			testenv.Cluster(t, func(t *testing.T, primary *testenv.Postgres) {
				t.Parallel()
				promotedUnderLoad(t, newRig(t, primary), mark)
			})
		})
	}
}

func promotedUnderLoad(t *testing.T, r *rig, mark outbox.Mark) {
	primary := r.pg
	r.markWith(mark)
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = window })
	standby := primary.NewStandby(t, "sb", nil)
	db := r.query1(`SELECT current_database()::text`)
	either := fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
		primary.Port(), standby.Port(), db)
	r.cfg.PostgresURL, r.url = either, either
	l := newLedger(r)
	x := r.start().streaming()
	stop := l.start(load{writers: 3, rows: 20, pause: 20 * time.Millisecond})
	eventually(t, "events are stored", func() bool { return r.storedCount() > 1000 })

	// The standby has these rows, and their marks will not reach it.
	unmarked := r.seize(moveSQL, 1, 500, 0)
	var rows uint64 // none comes while the table is locked
	r.must(unmarked.QueryRow(t.Context(), `SELECT count(*) FROM public.outbox_messages`).Scan(&rows))
	stored := r.storedSettles(rows)
	eventually(t, "the standby has the rows", func() bool {
		return r.query1(`SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication WHERE application_name = 'sb'`) == "true"
	})
	r.must(standby.Stop(t.Context(), testenv.Fast))
	r.must(run(t.Context(), unmarked, "COMMIT"))
	for range 2 * jetstream.U / 1000 {
		r.exec(moveSQL, 1+rand.IntN(l.accounts), 500, 0)
	}
	eventually(t, "events are stored that the standby lacks", func() bool { return r.storedCount() > stored+jetstream.U })
	r.must(primary.Stop(t.Context(), testenv.Immediate))
	r.must(standby.Start(t.Context()))
	r.must(standby.Promote(t.Context()))
	r.pg = standby

	phantoms := x.alarmed("phantoms")
	x.streaming()
	now := l.committed()
	eventually(t, "events of the new primary are stored", func() bool { return l.committed() > now+500 })
	stop()
	l.survived(r.leftAt(), phantoms["messages"].(int64))
	r.passes(r.here())
	found := 0
	for _, e := range x.logged("marked rows that were found in the stream").All() {
		found += int(e.ContextMap()["rows"].(int64))
	}
	if found < 500 {
		t.Errorf("%d rows had lost their marks, want 500: the test shows nothing", found)
	}
	if n := x.metric("walpost_missed_rows_total"); n != 0 {
		t.Errorf("%v rows were missed", n)
	}
	x.quiet("events_lost", "foreign_message", "rival", "stream_rolled_back", "slot_given_up")
}

// storedSettles waits until so much is stored, or nothing more has been for long, as U messages past one that cannot be marked.
// It returns how much is.
func (r *rig) storedSettles(rows uint64) (stored uint64) {
	r.t.Helper()
	since := time.Now()
	eventually(r.t, "the WAL is at rest", func() bool {
		if n := r.storedCount(); n != stored {
			stored, since = n, time.Now()
		}
		return stored >= rows || time.Since(since) > 5*time.Second
	})
	return stored
}

// leftAt is where the server's timeline branches off from the one before.
func (r *rig) leftAt() outbox.LSN {
	r.t.Helper()
	history := r.query1(`SELECT pg_read_file('pg_wal/00000002.history')`)
	lsn, err := outbox.ParseLSN(strings.Fields(history)[1])
	r.must(err)
	return lsn
}

// survived compares the stream with the ledger as delivered does, but for the
// events that lie on timeline 1 behind the point where it was left.
func (l *ledger) survived(leftAt outbox.LSN, wantPhantoms int64) {
	l.rig.t.Helper()
	for left := l.rig.unmarked(); left > 0; {
		before := left
		eventually(l.rig.t, "more rows are marked", func() bool { left = l.rig.unmarked(); return left < before })
	}
	last := map[string]int{}
	got, faults, phantoms := 0, 0, int64(0)
	eachHeader(l.rig.t, l.rig.nats.URL(), "EVENTS", func(seq uint64, h nats.Header) {
		p, err := outbox.ParsePosition(h.Get(jetstream.PositionHeader))
		l.rig.must(err)
		if p.Timeline == 1 && p.Commit >= leftAt {
			phantoms++
			return
		}
		got++
		account := h.Get("ce-aggregateid")
		if n, _ := strconv.Atoi(h.Get("ce-traceid")); n != last[account]+1 {
			if faults++; faults <= 10 {
				l.rig.t.Errorf("message %d: event %d of account %s follows event %d", seq, n, account, last[account])
			}
		}
		last[account]++
	})
	l.rig.t.Logf("%d events survived, %d are phantoms", got, phantoms)
	if want := l.committed(); got != want || faults > 0 {
		l.rig.t.Errorf("the stream holds %d events, want %d; %d are not where they belong", got, want, faults)
	}
	if phantoms != wantPhantoms {
		l.rig.t.Errorf("the relay has reported %d phantoms, want %d", wantPhantoms, phantoms)
	}
}

// TestAnswersBeforeAnyTail: on a promoted server the tables are answered before its WAL is read, and no message says
// otherwise until they are: a start after a crash on the way would take it for the answer.
func TestAnswersBeforeAnyTail(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, primary *testenv.Postgres) {
		r := newRig(t, primary)
		standby := primary.NewStandby(t, "sb", nil)
		db := r.query1(`SELECT current_database()::text`)
		eventually(t, "the standby has the database", func() bool {
			return r.query1(`SELECT coalesce((SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication WHERE application_name = 'sb'), false)`) == "true"
		})
		r.must(primary.Stop(t.Context(), testenv.Immediate))
		r.must(standby.Promote(t.Context()))
		r.pg, r.url = standby, standby.URL(db)
		r.cfg.PostgresURL = r.url
		r.put(1, 3)
		r.exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, r.cfg.Slot)
		r.start().streaming()
		r.pending(0)
		r.put(4, 5)
		r.pending(0)
		r.storedIs(1, 5)
		for i, m := range r.stored() {
			p, err := outbox.ParsePosition(m.Header.Get(jetstream.PositionHeader))
			r.must(err)
			if want := uint32(1 + i/3); p.Timeline != want {
				t.Errorf("message %d says timeline %d, want %d", i+1, p.Timeline, want)
			}
		}
	})
}
