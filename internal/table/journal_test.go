package table_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// fresh are the ids of the pending rows without a record that are due.
func (b *bench) fresh() string {
	b.t.Helper()
	cs, err := b.db.Fresh(b.t.Context(), b.table, time.Second, 100)
	b.must(err)
	return idsOf(cs)
}

// recorded are the ids of the parked and held rows that may be tried now.
func (b *bench) recorded() string {
	b.t.Helper()
	cs, err := b.db.Recorded(b.t.Context(), b.table, true, 100)
	b.must(err)
	return idsOf(cs)
}

func idsOf(cs []table.Candidate) string {
	var all []string
	for _, c := range cs {
		all = append(all, c.ID)
	}
	return strings.Join(all, " ")
}

// states are those of rows, a letter each: p(ending), r(ecorded), m(arked), gone (-).
func (b *bench) states(rows []table.Row) string {
	b.t.Helper()
	states, err := b.db.LookUp(b.t.Context(), b.table, rows)
	b.must(err)
	all := ""
	for _, s := range states {
		switch {
		case !s.Same:
			all += "-"
		case !s.Pending && !s.ProcessedAt.IsZero():
			all += "m"
		case s.Recorded:
			all += "r"
		default:
			all += "p"
		}
	}
	return all
}

func (b *bench) is(what, got, want string) {
	b.t.Helper()
	if got != want {
		b.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// TestJournal: a row is never changed, and its mark, its failures and its end as a dead letter stand in the journal.
func TestJournal(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		rows := b.insert(8)
		b.is("at first", b.states(rows), "pppppppp")
		b.is("fresh at first", b.fresh(), "1 2 3 4 5 6 7 8")
		b.want(b.mark(slices.Concat(rows[:2], rows[4:5])), table.Done, table.Done, table.Done)
		b.is("marked", b.states(rows), "mmppmppp")
		b.is("fresh", b.fresh(), "3 4 6 7 8")
		b.is("entries", b.text(`SELECT string_agg(concat(outbox, ' ', kind, ' ', ids), ' ' ORDER BY ids) FROM outbox_journal`),
			"public.outbox_messages stored {[1,3),[5,6)}")

		retry := table.Retry{Backoff: time.Hour, MaxAttempts: 1}
		parked := rows[2]
		parked.Failure = "refused"
		v, err := b.db.Park(t.Context(), b.table, []table.Row{parked}, retry)
		b.must(err)
		b.want(v, table.Done)
		v, err = b.db.Hold(t.Context(), b.table, rows[3:4])
		b.must(err)
		b.want(v, table.Done)
		b.is("recorded", b.states(rows), "mmrrmppp")
		b.is("fresh beside recorded rows", b.fresh(), "6 7 8")
		b.is("to be tried", b.recorded(), "4")
		b.is("deferred", b.text(`SELECT string_agg(concat(id, ' ', attempts, ' ', last_error, ' ', available_at > now() + interval '50 min'), ', ' ORDER BY id) FROM outbox_deferred`),
			"3 1 refused t, 4 0 held: an earlier row of its aggregate has failed f")
		evs, err := b.db.Fetch(t.Context(), b.table, []string{"3", "4", "5", "6"}, 1<<20)
		b.must(err)
		if len(evs.Rows) != 3 || string(evs.Rows[0].Values[outbox.Attempts]) != "1" {
			t.Errorf("fetched %+v", evs.Rows)
		}
		have, err := b.db.HaveRecords(t.Context(), b.table, evs.Rows)
		b.must(err)
		if !slices.Equal(have, []bool{true, true, false}) {
			t.Errorf("aggregates have records: %v", have)
		}
		p, h, err := b.db.RecordedCount(t.Context(), b.table, 100)
		b.must(err)
		n, err := b.db.PendingCount(t.Context(), b.table, 100)
		b.must(err)
		b.is("parked, held and pending", fmt.Sprint(p, h, n), "1 1 5")

		b.mark(rows[3:4])
		b.is("a held row that is delivered", b.states(rows), "mmrmmppp")
		parked.Polled, parked.Attempts = true, 1
		v, err = b.db.Park(t.Context(), b.table, []table.Row{parked}, retry)
		b.must(err)
		b.want(v, table.Done)
		b.is("a dead row", b.states(rows), "mmmmmppp")
		b.is("deferrals left", b.text(`SELECT count(*) FROM outbox_deferred`), "0")
		b.is("dead letter", b.text(`SELECT concat(row_id, ' ', attempts, ' ', last_error, ' ', original ->> 'event_type') FROM outbox_messages_dlq`),
			"3 2 refused order.created")
		found, err := b.db.Find(t.Context(), b.table, []outbox.Ref{rows[0].Ref, rows[2].Ref, rows[7].Ref})
		b.must(err)
		if found[0].Place != table.Marked || found[1].Place != table.Dead || found[2].Place != table.Pending {
			t.Errorf("found %v", found)
		}
		b.is("rows that were changed", b.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL OR last_error IS NOT NULL`), "0")
	})
}

// TestJournalKnows: the journal is asked first about rows that the WAL brings, and says the same as the table.
func TestJournalKnows(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		var a table.Advance
		settled := b.insert(10)
		b.mark(settled)
		b.must(b.db.Advance(t.Context(), b.table, &a))
		b.must(b.db.Advance(t.Context(), b.table, &a))
		b.is("progress", b.text(`SELECT `+testenv.Settled+` FROM outbox_known`), "10")
		b.exec(`DELETE FROM outbox_messages WHERE id = 3; DELETE FROM outbox_journal`) // as retention does
		rows := b.insert(10)
		b.mark(slices.Concat(rows[:2], rows[5:6]))
		parked := rows[3]
		parked.Failure = "refused"
		_, err := b.db.Park(t.Context(), b.table, []table.Row{parked}, table.Retry{Backoff: time.Hour, MaxAttempts: 5})
		b.must(err)
		all := slices.Concat(settled[2:4], rows)
		whole, err := b.db.LookUp(t.Context(), b.table, all)
		b.must(err)
		states, err := b.db.LookUpInserted(t.Context(), b.table, all)
		b.must(err)
		publish := ""
		for i, s := range states {
			if s != whole[i] {
				t.Errorf("row %s: %+v, and the table says %+v", all[i].Ref.ID, s, whole[i])
			}
			if s.Publish() {
				publish += " " + all[i].Ref.ID
			}
		}
		b.is("to be published", publish, " 4 13 15 17 18 19 20")
	})
}

// TestJournalHealing: lost rows are pending again, held, and dead and skipped ones are not lost.
func TestJournalHealing(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		rows := b.insert(10)
		if has, err := b.db.HasMarks(t.Context(), b.table); err != nil || has {
			t.Fatalf("marks at first: %v, %v", has, err)
		}
		b.mark(rows[:4])
		b.mark(rows[5:7])
		skipped, err := b.skip(b.table)
		b.must(err)
		b.is("skipped", fmt.Sprint(skipped), "[4]")
		b.is("states", b.states(rows), "mmmmmmmmmm")
		b.insert(2)

		lost := b.listed(false)
		ids := ""
		for _, r := range lost {
			ids += r.ID + " "
		}
		b.is("marked rows", ids, "1 2 3 4 6 7 ")
		pending, locked, err := b.db.Unmark(t.Context(), b.table, lost[1:5])
		b.must(err)
		if len(pending) != 4 || len(locked) != 0 {
			t.Errorf("unmarked %d, locked %v", len(pending), locked)
		}
		b.is("after the loss", b.states(rows), "mrrrmrmmmm")
		b.is("to be tried", b.recorded(), "2 3 4 6")
		b.mark(rows[1:2])
		pending, _, err = b.db.Unmark(t.Context(), b.table, lost[1:2])
		b.must(err)
		b.is("another mark", fmt.Sprint(len(pending), " ", b.states(rows)), "0 mmrrmrmmmm")

		b.mark(rows[1:4])
		b.mark(rows[2:4]) // by a second relay, say
		lost = b.listed(false)[3:]
		ids = ""
		for _, r := range lost {
			ids += r.ID + " "
		}
		b.is("rows, for each mark", ids, "2 3 4 3 4 ")
		pending, _, err = b.db.Unmark(t.Context(), b.table, lost)
		b.must(err)
		b.is("rows with two marks", fmt.Sprint(len(pending), " ", b.states(rows)), "3 mrrrmrmmmm")
	})
}

// TestJournalProgress: the progress passes no row that is pending. Ids of transactions that are still open, or prepared, are
// its holes. Rows that are due later do not keep it.
func TestJournalProgress(t *testing.T) {
	testenv.ClustersWith(t, testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "5"}}, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		var a table.Advance
		progress := func(what, want string) {
			t.Helper()
			b.must(b.db.Advance(t.Context(), b.table, &a)) // sees the rows, and the transactions that are open now
			b.must(b.db.Advance(t.Context(), b.table, &a))
			b.is(what, b.text(`SELECT concat(coalesce(max(`+testenv.Settled+`), 0), ' ', max(`+testenv.Holes+`::text)) FROM outbox_known WHERE condition = `+outbox.QuoteLiteral(b.table.Where)), want)
		}
		progress("empty", "0 {}")
		rows := b.insert(5)
		progress("pending", "0 {}")
		b.mark(rows)
		progress("delivered", "5 {}")

		writer, other := b.connect(), b.connect()
		run := func(c *pgx.Conn, sql string) {
			t.Helper()
			_, err := c.Exec(t.Context(), sql)
			b.must(err)
		}
		const one = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'a.b', '{}')`
		run(writer, `BEGIN`)
		run(writer, one) // 6
		b.mark(b.insert(2))
		progress("an open transaction", "8 {[6,7)}")
		run(other, `BEGIN`)
		run(other, one) // 9
		run(other, `ROLLBACK`)
		run(writer, one) // 10
		b.mark(b.insert(1))
		progress("one was rolled back meanwhile", "11 {[6,7),[9,11)}")
		run(writer, `PREPARE TRANSACTION 'x'`)
		progress("it is prepared", "11 {[6,7),[9,11)}")
		b.is("none is pending", b.fresh(), "")
		run(writer, `COMMIT PREPARED 'x'`)
		b.is("its rows", b.fresh(), "6 10")
		states, err := b.db.LookUpInserted(t.Context(), b.table, []table.Row{b.row("6"), b.row("10")})
		b.must(err)
		if !states[0].Publish() || !states[1].Publish() {
			t.Errorf("its rows come from the WAL: %+v", states)
		}
		progress("it has ended, and its rows are pending", "11 {[6,7),[9,11)}")
		b.mark([]table.Row{b.row("6")})
		progress("one is delivered", "11 {[6,7),[9,11)}")
		b.is("the other one", b.fresh(), "10")
		n, _, err := b.db.DeleteJournaled(t.Context(), b.table, time.Now().Add(time.Hour), 100)
		b.must(err)
		b.is("entries that are deleted", fmt.Sprint(n), "3") // that of 6 stays
		b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
			VALUES ('a', 1, 'a.b', '{}', now() + interval '1 hour')`) // 12
		b.mark([]table.Row{b.row("10")})
		progress("both are delivered, and another row is due later", "12 {}")
		b.is("deferred", b.text(`SELECT string_agg(concat(id, ' ', attempts, last_error), ', ') FROM outbox_deferred`), "12 0")
		b.is("no row is due", b.fresh(), "")
		b.exec(`UPDATE outbox_deferred SET available_at = now()`)
		b.is("it is due", b.fresh(), "12")

		b.table.Where = `event_type <> 'a.note' AND payload #>> '{id}' IS NULL AND payload #>> '{outbox}' IS NULL`
		b.must(b.db.CheckTable(t.Context(), b.table))
		b.must(b.db.Know(t.Context(), b.table, "test"))
		const note = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'a.note', '{}')`
		b.exec(note)
		progress("a row that is no event", "13 {}")
		run(writer, `BEGIN`)
		run(writer, one) // 14
		b.exec(note)
		progress("one more, beside an open transaction", "15 {[14,15)}")
		run(writer, `ROLLBACK`)
		progress("that is rolled back", "15 {}")
	})
}

// TestJournalOfShards: the relays of two shards move one progress on. One that the other has overtaken goes on when that is
// gone.
func TestJournalOfShards(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	var slow, quick table.Advance
	b.mark(b.insert(5))
	b.must(b.db.Advance(t.Context(), b.table, &slow))
	b.mark(b.insert(5))
	for range 2 {
		b.must(b.db.Advance(t.Context(), b.table, &quick))
	}
	b.is("the quick one", b.text(`SELECT `+testenv.Settled+` FROM outbox_known`), "10")
	b.mark(b.insert(5))
	for range 2 {
		b.must(b.db.Advance(t.Context(), b.table, &slow))
	}
	b.is("the slow one", b.text(`SELECT `+testenv.Settled+` FROM outbox_known`), "15")
}

// TestJournalHoles: many holes become few, and no row of theirs is lost.
func TestJournalHoles(t *testing.T) {
	defer func(n int) { *table.MostHoles = n }(*table.MostHoles)
	*table.MostHoles = 10
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	var a table.Advance
	writer := b.connect()
	run := func(sql string) {
		t.Helper()
		_, err := writer.Exec(t.Context(), sql)
		b.must(err)
	}
	run(`BEGIN`)
	want := ""
	for i := range 100 {
		run(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'a.b', '{}')`)
		want += fmt.Sprint(7*i+1, " ")
		b.mark(b.insert(6))
		b.must(b.db.Advance(t.Context(), b.table, &a))
	}
	b.must(b.db.Advance(t.Context(), b.table, &a))
	b.is("holes", b.text(`SELECT concat(`+testenv.Settled+`, ' ', (SELECT count(*) <= 11 FROM unnest(`+testenv.Holes+`)), ' ', `+testenv.Holes+` @> 1::bigint, ' ', `+testenv.Holes+` @> 694::bigint, ' ', upper(`+testenv.Holes+`) > 694) FROM outbox_known`), "700 t t t t")
	b.is("pending", b.fresh(), "")
	run(`COMMIT`)
	b.is("pending at last", b.fresh()+" ", want)
	b.must(b.db.Advance(t.Context(), b.table, &a))
	b.is("pending still", b.fresh()+" ", want)
	var rows []table.Row
	for _, id := range strings.Fields(want) {
		rows = append(rows, b.row(id))
	}
	b.mark(rows)
	b.must(b.db.Advance(t.Context(), b.table, &a))
	b.must(b.db.Advance(t.Context(), b.table, &a))
	b.is("in the end", b.text(`SELECT concat(`+testenv.Settled+`, ' ', `+testenv.Holes+`) FROM outbox_known`), "700 {}")
}

// row is a row with an id, of unknown content.
func (b *bench) row(id string) table.Row {
	return table.Row{Ref: outbox.Ref{Table: b.table, ID: id, Hash: outbox.UnknownHash}}
}

// TestReplayOfRowsThatHaveTwoEntries: a replay has each once, with the last of its marks from before its end.
func TestReplayOfRowsThatHaveTwoEntries(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		b.insert(20)
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_messages', 'stored', '{[1,11)}', '2026-01-01'),
			('public.outbox_messages', 'stored', '{[5,8),[12,13)}', '2026-01-02'), ('public.outbox_messages', 'stored', '{[7,7],[15,21)}', '2026-01-03')`)
		read := func(until string, from table.ReplayCursor) string {
			t.Helper()
			at, err := time.Parse(time.DateOnly, until)
			b.must(err)
			ids, err := b.replayIDs(table.ReplayChoice{Until: &at}, from, func(table.ReplayRow) error { return nil })
			b.must(err)
			return strings.Trim(fmt.Sprint(ids), "[]")
		}
		b.is("all", read("2026-02-01", table.ReplayCursor{}), "1 2 3 4 8 9 10 5 6 12 7 15 16 17 18 19 20")
		b.is("up to the second mark", read("2026-01-02", table.ReplayCursor{}), "1 2 3 4 5 6 7 8 9 10")
		b.is("behind a row", read("2026-02-01", table.ReplayCursor{At: "2026-01-02 00:00:00+00", ID: "5"}), "6 12 7 15 16 17 18 19 20")
	})
}
