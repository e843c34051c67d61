package table_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// held has each statement that writes to a table wait until the returned function is called: BEFORE it writes, but after its snapshot
// was taken, or AFTER it.
func (b *bench) held(name, when string) (release func()) {
	b.t.Helper()
	b.exec(`CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN coalesce(NEW, OLD); END $$;
		CREATE TRIGGER hold ` + when + ` INSERT OR UPDATE OR DELETE ON ` + name + ` FOR EACH ROW EXECUTE FUNCTION hold(); SELECT pg_advisory_lock(77)`)
	return func() { b.exec(`SELECT pg_advisory_unlock(77)`) }
}

// waits waits until so many sessions wait for a lock, or else is true.
func (b *bench) waits(sessions string, or func() bool) {
	b.t.Helper()
	const waiting = `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`
	for begun := time.Now(); b.text(waiting) != sessions && !or(); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > testenv.Patience {
			b.t.Fatalf("waited in vain for %s sessions that wait", sessions)
		}
	}
}

// The states of row 2, from which statements of a pair begin.
const (
	stateFresh  = "fresh"
	stateLater  = "later" // it is due in an hour
	stateParked = "parked"
	stateMarked = "marked"
	stateDead   = "dead"
	stateGone   = "gone" // it was parked, and somebody has deleted it
)

// prepare brings row 2 into a state. Rows 1 and 3 are marked, and the progress has passed row 1.
func (b *bench) prepare(state string) (row table.Row) {
	b.t.Helper()
	first := b.insert(1)
	b.mark(first)
	var a table.Advance
	b.must(b.db.Advance(b.t.Context(), b.table, &a))
	b.must(b.db.Advance(b.t.Context(), b.table, &a))
	rows := b.insert(2)
	row = rows[0]
	b.mark(rows[1:])
	park := func(most int) {
		failed := row
		failed.Failure = "refused"
		_, err := b.db.Park(b.t.Context(), b.table, []table.Row{failed}, table.Retry{Backoff: time.Hour, MaxAttempts: most})
		b.must(err)
	}
	switch state {
	case stateLater:
		b.exec(`ALTER TABLE outbox_messages DISABLE TRIGGER outbox_no_update; UPDATE outbox_messages SET available_at = now() + interval '1 hour' WHERE id = 2;
			ALTER TABLE outbox_messages ENABLE ALWAYS TRIGGER outbox_no_update`)
	case stateParked:
		park(10)
	case stateMarked:
		b.mark(rows[:1])
	case stateDead:
		park(0)
	case stateGone:
		park(10)
		b.exec(`DELETE FROM outbox_messages WHERE id = 2`)
	}
	return row
}

// patient repeats what waits for a lock for five seconds only.
func patient(do func() error) func() error {
	return func() error {
		err := do()
		for table.IsLocked(err) {
			err = do()
		}
		return err
	}
}

// mover is a statement that moves ids of a journal.
type mover struct {
	name string
	at   string // the table that it writes first
	from []string
	// make prepares it on a connection.
	make func(b *bench, db *table.DB, row table.Row) func() error
}

func movers() []mover {
	record := func(b *bench, db *table.DB, row table.Row, most int) func() error {
		failed := row
		failed.Failure = "refused again"
		if b.text(`SELECT EXISTS (SELECT FROM outbox_deferred WHERE id = 2)`) == "true" {
			failed.Polled, failed.Attempts = true, 1
		}
		if most == 0 {
			failed.Attempts = 1
		}
		return func() error {
			_, err := db.Park(b.t.Context(), b.table, []table.Row{failed}, table.Retry{Backoff: time.Hour, MaxAttempts: most})
			return err
		}
	}
	advance := func(b *bench, db *table.DB, _ table.Row) func() error {
		var a table.Advance
		b.must(db.Advance(b.t.Context(), b.table, &a)) // sees how far
		return func() error { return db.Advance(b.t.Context(), b.table, &a) }
	}
	return []mover{
		{"mark", table.JournalEntries, []string{stateFresh, stateLater, stateParked, stateMarked, stateGone}, func(b *bench, db *table.DB, row table.Row) func() error {
			return func() error {
				_, err := db.Mark(b.t.Context(), b.table, []table.Row{row})
				return err
			}
		}},
		{"defer", table.JournalDeferred, []string{stateLater}, advance},
		{"progress", table.KnownTable, []string{stateParked, stateMarked, stateDead, stateGone}, advance},
		{"void", table.KnownTable, []string{stateFresh, stateLater, stateParked, stateMarked, stateDead}, func(b *bench, db *table.DB, _ table.Row) func() error {
			b.exec(`UPDATE outbox_known SET timeline = 0`)
			return func() error { return db.Know(b.t.Context(), b.table, "test") }
		}},
		{"search", table.KnownTable, []string{stateFresh, stateLater, stateParked, stateMarked, stateDead}, func(b *bench, db *table.DB, _ table.Row) func() error {
			return func() error { _, err := db.SearchAgain(b.t.Context(), b.table, []int64{1}); return err }
		}},
		{"park", table.JournalDeferred, []string{stateFresh, stateLater, stateParked}, func(b *bench, db *table.DB, row table.Row) func() error {
			return record(b, db, row, 10)
		}},
		{"hold", table.JournalDeferred, []string{stateFresh, stateLater}, func(b *bench, db *table.DB, row table.Row) func() error {
			return func() error {
				_, err := db.Hold(b.t.Context(), b.table, []table.Row{row})
				return err
			}
		}},
		{"die", table.JournalEntries, []string{stateFresh, stateLater, stateParked}, func(b *bench, db *table.DB, row table.Row) func() error {
			return record(b, db, row, 0)
		}},
		{"unmark", table.JournalEntries, []string{stateMarked}, func(b *bench, db *table.DB, _ table.Row) func() error {
			marked := slices.DeleteFunc(b.listed(false), func(r table.MarkedRow) bool { return r.ID != "2" })
			return func() error {
				_, _, err := db.Unmark(b.t.Context(), b.table, marked)
				return err
			}
		}},
		{"retry", table.JournalEntries, []string{stateDead}, func(b *bench, _ *table.DB, _ table.Row) func() error {
			q := b.dlq(b.table)
			return patient(func() error { return q.Retry(b.t.Context(), deadletter.Filter{}, false, func(deadletter.Outcome) {}) })
		}},
		{"skip", table.JournalEntries, []string{stateFresh, stateLater, stateParked}, func(b *bench, _ *table.DB, _ table.Row) func() error {
			return patient(func() error { _, err := b.skip(b.table); return err })
		}},
		{"give up", table.JournalDeferred, []string{stateParked}, func(b *bench, db *table.DB, _ table.Row) func() error {
			return func() error {
				err := db.GiveUp(b.t.Context(), b.table, "2", 10)
				if err != nil && !strings.Contains(err.Error(), "not parked") {
					return err
				}
				return nil
			}
		}},
		{"forget", table.JournalDeferred, []string{stateGone}, func(b *bench, db *table.DB, _ table.Row) func() error {
			return func() error { return db.ForgetDeferred(b.t.Context(), b.table) }
		}},
		{"delete", table.JournalEntries, []string{stateParked, stateMarked, stateDead}, func(b *bench, db *table.DB, _ table.Row) func() error {
			b.exec(`UPDATE outbox_known SET unsettled = '{[4,)}'`)
			return func() error {
				_, _, err := db.DeleteJournaled(b.t.Context(), b.table, time.Now().Add(time.Hour), 100)
				return err
			}
		}},
	}
}

// TestMovers: of each pair of statements that move ids one is between its snapshot and its commit while the other runs.
func TestMovers(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		type pair struct {
			first, second mover
			state, when   string
		}
		var pairs []pair
		for _, first := range movers() {
			for _, second := range movers() {
				for _, state := range first.from {
					if slices.Contains(second.from, state) {
						pairs = append(pairs, pair{first, second, state, "BEFORE"}, pair{first, second, state, "AFTER"})
					}
				}
			}
		}
		for _, p := range testenv.Some(t, 40, pairs...) {
			t.Run(fmt.Sprintf("%s/%s/%s/%s", p.first.name, p.second.name, p.state, p.when), func(t *testing.T) {
				newBench(t, pg, outbox.MarkJournal).pair(p.first, p.second, p.state, p.when)
			})
		}
	})
}

func (b *bench) pair(first, second mover, state, when string) {
	t := b.t
	row := b.prepare(state)
	other := b.open()
	for _, db := range []*table.DB{b.db, other} {
		b.must(db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET lock_timeout = 0`)
			return err
		}))
	}
	one, two := first.make(b, b.db, row), second.make(b, other, row)
	release := b.held(first.at, when)
	done := make(chan error, 2)
	go func() { done <- one() }()
	b.waits("1", func() bool { return len(done) > 0 })
	if len(done) > 0 {
		t.Fatalf("%s is not held: %v", first.name, <-done)
	}
	go func() { done <- two() }()
	b.waits("2", func() bool { return len(done) > 0 })
	release()
	for range 2 {
		if err := <-done; err != nil && !strings.Contains(err.Error(), "made meanwhile: no row is marked") {
			t.Error(err)
		}
	}

	const entry = `EXISTS (SELECT FROM outbox_journal j WHERE j.ids @> `
	b.is("rows with an entry and a deferral", b.text(`SELECT count(*) FROM outbox_deferred d WHERE `+entry+`d.id)`), "0")
	b.is("rows that no search finds", b.text(`SELECT count(*) FROM outbox_messages t, outbox_known k WHERE NOT k.unsettled @> t.id
		AND NOT `+entry+`t.id) AND NOT EXISTS (SELECT FROM outbox_deferred d WHERE d.id = t.id)`), "0")
	if state != stateGone {
		b.is("deferrals without a row", b.text(`SELECT count(*) FROM outbox_deferred d WHERE NOT EXISTS (SELECT FROM outbox_messages t WHERE t.id = d.id)`), "0")
	}
	ran := func(name string) bool { return first.name == name || second.name == name }
	if (ran("void") || ran("search")) && !ran("defer") { // that goes on with a progress of its own
		b.is("what is to be searched again", b.text(`SELECT unsettled @> 1::bigint FROM outbox_known`), "true")
	}
	if ran("give up") {
		b.is("attempts of a row that was given up", b.text(`SELECT coalesce(min(attempts), 10) FROM outbox_deferred WHERE id = 2`), "10")
	}
	if ran("retry") {
		b.is("the dead letter, or its row", b.text(`SELECT (SELECT count(*) FROM outbox_messages_dlq)
			+ (SELECT count(*) FROM outbox_messages t WHERE NOT `+entry+`t.id))`), "1")
	}
}

// TestLockedTableKeepsNoMark: who would be alone in moving ids, and waits for the lock of a table, keeps nobody from marking rows.
func TestLockedTableKeepsNoMark(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	rows := b.insert(2)
	b.must(b.db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET lock_timeout = 0`)
		return err
	}))
	other := b.open()
	b.exec(`BEGIN; LOCK TABLE outbox_messages`)
	held := make(chan error, 1)
	go func() {
		_, err := b.db.Hold(t.Context(), b.table, rows[:1])
		held <- err
	}()
	b.waits("1", func() bool { return len(held) > 0 })
	v, err := other.Mark(t.Context(), b.table, rows[1:])
	b.must(err)
	b.want(v, table.Done)
	b.exec(`ROLLBACK`)
	b.must(<-held)
}

// TestSearchAgain: some ids are searched again, or every id.
func TestSearchAgain(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	b.exec(`UPDATE outbox_known SET unsettled = '{[9,)}'`)
	again := func(ids []int64, want string) {
		t.Helper()
		known, err := b.db.SearchAgain(t.Context(), b.table, ids)
		b.must(err)
		if got := b.text(`SELECT unsettled FROM outbox_known`); !known || got != want {
			t.Errorf("unsettled %s, want %s (known %t)", got, want, known)
		}
	}
	again([]int64{3, 4, 7}, "{[3,5),[7,8),[9,)}")
	again(nil, "{[-9223372036854775808,)}")
	b.exec(`DELETE FROM outbox_known`)
	known, err := b.db.SearchAgain(t.Context(), b.table, nil)
	if b.must(err); known {
		t.Error("the progress of an outbox that is not known was changed")
	}
}
