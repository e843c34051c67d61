package relay_test

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// joined waits until the slot brings the rows of so many outboxes.
func (r *rig) joined(outboxes int) {
	r.t.Helper()
	eventually(r.t, "the outboxes have joined", func() bool {
		return r.count(`SELECT count(*) FROM outbox_sent WHERE published_as IS NOT NULL`) == outboxes
	})
}

// TestOutboxJoinsInOrder: an outbox begins, or begins again, on a slot that is there already, while its rows are written. No row
// overtakes another one of its aggregate, and none is missed.
func TestOutboxJoinsInOrder(t *testing.T) {
	t.Parallel()
	const add = `ALTER PUBLICATION walpost ADD TABLE public.outbox_messages`
	const drop = `ALTER PUBLICATION walpost DROP TABLE public.outbox_messages`
	for _, name := range testenv.Some(t, 3, "added", "added, killed", "put back", "published again", "published again meanwhile", "no inserts for a while") {
		for _, mark := range testenv.Some(t, 1, outbox.MarkUpdate, outbox.MarkJournal) {
			t.Run(name+"/"+string(mark), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.addSecond()
				r.markWith(mark)
				both := r.cfg.Outboxes
				second := both[1:]
				l := newLedger(r)
				stop := l.start(load{writers: 4, rows: 5, pause: 5 * time.Millisecond, ahead: 1 << 20})
				begin := func(outboxes []*outbox.Table) *running {
					r.cfg.Outboxes = outboxes
					return r.start().streaming()
				}
				grows := func() {
					t.Helper()
					l.reaches(l.committed() + 1500)
				}
				var x *running
				switch name {
				case "added", "added, killed":
					x = begin(second)
					grows()
					x.halt()
					r.exec(add)
					if r.cfg.Outboxes = both; name == "added, killed" {
						r.launch("WALPOST_CRASH=polled:300").crashed("polled")
					}
					x = begin(both)
				case "put back":
					x = begin(both)
					grows()
					x.halt()
					x = begin(second)
					grows()
					x.halt()
					x = begin(both)
				case "published again":
					x = begin(both)
					grows()
					x.halt()
					r.exec(drop)
					grows()
					r.exec(add)
					x = begin(both)
				case "published again meanwhile":
					x = begin(both)
					grows()
					r.exec(drop)
					grows()
					r.exec(add)
					grows()
				case "no inserts for a while":
					x = begin(both)
					grows()
					r.exec(`ALTER PUBLICATION walpost SET (publish = 'update')`)
					grows()
					r.exec(`ALTER PUBLICATION walpost SET (publish = 'insert')`)
					grows()
				}
				r.joined(2)
				grows()
				stop()
				l.delivered()
				r.passes(r.here())
				if name == "added" || name == "put back" {
					x.quiet("missed_rows")
				}
			})
		}
	}
}

// TestOthersStreamWhileOneJoins: a row of an outbox that joins is locked. Its aggregate waits, the other outboxes stream, and the
// slot keeps no WAL for it.
func TestOthersStreamWhileOneJoins(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	both := r.cfg.Outboxes
	r.cfg.Outboxes = both[1:]
	r.start().streaming().halt()
	r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
	r.put(1, 3)
	lock := r.conn()
	r.must(run(t.Context(), lock, `BEGIN; SELECT FROM outbox_messages WHERE payload ->> 'n' = '2' FOR UPDATE`))
	r.cfg.Outboxes = both
	x := r.start().streaming()
	r.put(4, 4)
	r.putSecond(100, 110)
	r.passes(r.here())
	x.alarmed("row_locked")
	holds := func(ranges ...int) {
		t.Helper()
		got := r.numbers()
		slices.SortStableFunc(got, func(a, b int) int { return a/100 - b/100 }) // each outbox in its order
		if want := span(ranges...); !slices.Equal(got, want) {
			t.Errorf("stored %s, want %s", brief(got), brief(want))
		}
	}
	holds(1, 1, 100, 110)
	r.must(run(t.Context(), lock, `ROLLBACK`))
	r.joined(2)
	r.put(5, 5)
	r.pending(0)
	holds(1, 5, 100, 110)
	x.quiet("missed_rows")
	if via := r.stored()[15].Header.Get("Walpost-Via"); via != "" {
		t.Errorf("the last message came via %s, want the WAL", strconv.Quote(via))
	}
}

// TestUpdatedRowsDoNotJoinEarly: while an outbox joins, a row of it stays locked, is updated, and is then locked by a transaction that has
// begun later. The outbox joins when that row is delivered, and later rows do not overtake it.
func TestUpdatedRowsDoNotJoinEarly(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	both := r.cfg.Outboxes
	r.cfg.Outboxes = both[1:]
	r.start().streaming().halt()
	r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
	r.put(1, 3)
	lock := func() *pgx.Conn {
		t.Helper()
		conn := r.conn()
		r.must(run(t.Context(), conn, `BEGIN; SELECT FROM outbox_messages WHERE payload ->> 'n' = '2' FOR KEY SHARE`))
		return conn
	}
	locked := lock()
	r.cfg.Outboxes = both
	x := r.start().streaming()
	for n := range 30 { // each may end what a relay waits for that goes by transactions
		next := lock()
		r.exec(`UPDATE outbox_messages SET event_type = event_type WHERE processed_at IS NULL`)
		r.must(run(t.Context(), locked, `ROLLBACK`))
		r.must(locked.Close(t.Context()))
		locked = next
		r.putSecond(100+n, 100+n)
	}
	if n := r.count(`SELECT count(*) FROM outbox_sent WHERE published_as IS NOT NULL`); n != 1 {
		t.Errorf("%d outboxes have joined while a row of the second is locked, want 1", n)
	}
	r.put(4, 4)
	r.passes(r.here())
	r.must(run(t.Context(), locked, `ROLLBACK`))
	r.joined(2)
	r.put(5, 5)
	r.pending(0)
	got := slices.DeleteFunc(r.numbers(), func(n int) bool { return n >= 100 })
	if want := span(1, 5); !slices.Equal(got, want) {
		t.Errorf("stored %s, want %s", brief(got), brief(want))
	}
	x.quiet("missed_rows")
}

// TestPublishedAgainIsNoticed: a table without new rows is out of the publication for a while, and joins again.
func TestPublishedAgainIsNoticed(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.joined(1)
	r.exec(`ALTER PUBLICATION walpost DROP TABLE outbox_messages`)
	r.joined(0)
	x.alarmed("unpublished")
	r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
	r.joined(1)
	r.put(4, 5)
	r.pending(0)
	r.storedIs(1, 5)
	x.quiet("missed_rows")
}
