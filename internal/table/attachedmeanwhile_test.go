package table

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestAttachedMeanwhile: a partition is attached while a statement waits for a lock, and its plan has the others. What it finds in those
// is not taken for all.
func TestAttachedMeanwhile(t *testing.T) {
	for name, c := range map[string]struct {
		known string // of the rows 1 to 10
		do    func(*testing.T, *DB, *outbox.Table) error
		want  string // entries, rows, pending ones
	}{
		"entries are deleted": {
			`INSERT INTO public.outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,11)}', now() - interval '1 day');
				UPDATE public.outbox_known SET unsettled = '{[11,)}'`,
			func(t *testing.T, db *DB, table *outbox.Table) error {
				_, _, err := db.DeleteJournaled(t.Context(), table, time.Now(), 10)
				return err
			},
			"1 10 0",
		},
		"deferrals are forgotten": {
			`INSERT INTO public.outbox_deferred (outbox, id, available_at, partition_oid)
				SELECT 'public.outbox_events', id, '-infinity', tableoid FROM public.outbox_events; UPDATE public.outbox_known SET unsettled = '{[11,)}'`,
			func(t *testing.T, db *DB, table *outbox.Table) error { return db.ForgetDeferred(t.Context(), table) },
			"0 10 10",
		},
		"the progress moves": {
			`UPDATE public.outbox_known SET unsettled = '{[-9223372036854775808,)}'`,
			func(t *testing.T, db *DB, table *outbox.Table) error {
				timeless := *table
				timeless.Layout.Columns[outbox.AvailableAt] = "" // or an earlier statement would wait
				_, err := db.take(t.Context(), &timeless, step{to: 10, ended: 10}, &Advance{})
				return err
			},
			"0 10 10",
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, table, exec := withJournal(t, testenv.SharedPostgres(t))
			exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 10) g`)
			exec(testenv.SettledTo("public.outbox_events", 10, ""))
			exec(`UPDATE public.outbox_known SET table_oid = 'public.outbox_events'::regclass, partitions = ` + PartitionsSQL(table))
			exec(c.known)
			exec(`ALTER TABLE public.outbox_events DETACH PARTITION public.outbox_events_1000000`)
			other, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
			must(t, err)
			defer other.Close(t.Context())
			run := func(sql string) {
				t.Helper()
				_, err := other.Exec(t.Context(), sql)
				must(t, err)
			}
			run(`BEGIN`)
			run(`ALTER TABLE public.outbox_events ATTACH PARTITION public.outbox_events_1000000 FOR VALUES FROM (MINVALUE) TO (1000001)`)
			run(`LOCK TABLE public.outbox_events_rest IN ACCESS EXCLUSIVE MODE`)
			exec(`SET lock_timeout = '1min'`)
			done := make(chan error, 1)
			go func() { done <- c.do(t, db, table) }()
			for waits := false; !waits && len(done) == 0; time.Sleep(5 * time.Millisecond) {
				must(t, other.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'public.outbox_events_rest'::regclass AND NOT granted)`).Scan(&waits))
			}
			run(`COMMIT`)
			must(t, <-done)
			n, err := db.PendingCount(t.Context(), table, 100)
			must(t, err)
			var entries, rows int
			must(t, db.Conn().QueryRow(t.Context(), `SELECT (SELECT count(*) FROM public.outbox_journal), (SELECT count(*) FROM public.outbox_events)`).Scan(&entries, &rows))
			if got := []int{entries, rows, n}; strings.Trim(fmt.Sprint(got), "[]") != c.want {
				t.Errorf("entries, rows, pending ones: %v, want %s", got, c.want)
			}
		})
	}
}

// TestDetachedMeanwhile: DETACH CONCURRENTLY begins while a statement waits that has asked for the partitions. The deferrals of its
// rows stay.
func TestDetachedMeanwhile(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 10) g`)
	exec(`INSERT INTO public.outbox_deferred (outbox, id, available_at, partition_oid) SELECT 'public.outbox_events', id, '-infinity', tableoid FROM public.outbox_events`)
	exec(`SET lock_timeout = '1min'`)
	connect := func() *pgx.Conn {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
		must(t, err)
		t.Cleanup(func() { conn.Close(context.Background()) })
		return conn
	}
	other, detacher := connect(), connect()
	until := func(sql string) {
		t.Helper()
		for is, begun := false, time.Now(); !is; time.Sleep(5 * time.Millisecond) {
			must(t, other.QueryRow(t.Context(), sql).Scan(&is))
			if time.Since(begun) > testenv.Patience {
				t.Fatalf("waited in vain for %s", sql)
			}
		}
	}
	_, err := other.Exec(t.Context(), `BEGIN; LOCK TABLE public.outbox_deferred IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	forgotten, detached := make(chan error, 1), make(chan error, 1)
	go func() { forgotten <- db.ForgetDeferred(t.Context(), table) }()
	until(`SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'public.outbox_deferred'::regclass AND NOT granted)`)
	go func() {
		_, err := detacher.Exec(t.Context(), `ALTER TABLE public.outbox_events DETACH PARTITION public.outbox_events_1000000 CONCURRENTLY`)
		detached <- err
	}()
	until(`SELECT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = 'public.outbox_events_1000000'::regclass AND inhdetachpending)`)
	_, err = other.Exec(t.Context(), `COMMIT`)
	must(t, err)
	must(t, <-forgotten)
	must(t, <-detached)
	var left int
	must(t, db.Conn().QueryRow(t.Context(), `SELECT count(*) FROM public.outbox_deferred`).Scan(&left))
	if left != 10 {
		t.Errorf("%d deferrals are left, want 10", left)
	}
}

// TestDetachPending: a partition whose DETACH CONCURRENTLY did not come to its end is detached, with its identity, too.
func TestDetachPending(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, server *testenv.Postgres) {
		db, table, exec := withJournal(t, server)
		other, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
		must(t, err)
		defer other.Close(t.Context())
		_, err = other.Exec(t.Context(), `BEGIN; SELECT FROM public.outbox_events`)
		must(t, err)
		exec(`SET lock_timeout = 0; SET statement_timeout = '300ms'`)
		if _, err := db.Conn().Exec(t.Context(), `ALTER TABLE public.outbox_events DETACH PARTITION public.outbox_events_1000000 CONCURRENTLY`); err == nil {
			t.Fatal("the partition is detached")
		}
		exec(`SET statement_timeout = 0`)
		names, err := db.Detached(t.Context(), table)
		must(t, err)
		if got := strings.Join(names, " "); got != "public.outbox_events_1000000" {
			t.Errorf("detached are %q", got)
		}
	})
}

// TestInsertedRowIsGone: the WAL brings a row again that retention has deleted with its entry, and the progress has become void since.
func TestInsertedRowIsGone(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(testenv.SettledTo("public.outbox_events", 0, ""))
	exec(`UPDATE public.outbox_known SET unsettled = '{[-9223372036854775808,)}'`)
	var xid int64
	must(t, db.Conn().QueryRow(t.Context(), `SELECT pg_current_xact_id()::xid::text::bigint`).Scan(&xid))
	states, err := db.LookUpInserted(t.Context(), table, []Row{{Ref: outbox.Ref{Table: table, ID: "5", Hash: 1}, XID: uint32(xid)}})
	must(t, err)
	if states[0].Exists || states[0].Pending {
		t.Errorf("the row is %+v", states[0])
	}
}

// TestInsertedAgainBeforeItIsVisible: the WAL brings a transaction before the server shows it. A row of it that was delivered before is
// not sent for that.
func TestInsertedAgainBeforeItIsVisible(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(testenv.SettledTo("public.outbox_events", 10, ""))
	exec(`INSERT INTO public.outbox_journal (outbox, kind, ids) VALUES ('public.outbox_events', 'stored', '{[5,6)}')`)
	other, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
	must(t, err)
	defer other.Close(t.Context())
	var xid int64
	_, err = other.Exec(t.Context(), `BEGIN`)
	must(t, err)
	must(t, other.QueryRow(t.Context(), `SELECT pg_current_xact_id()::xid::text::bigint`).Scan(&xid))
	row := func(id string) Row {
		return Row{Ref: outbox.Ref{Table: table, ID: id, Hash: 1}, XID: uint32(xid)}
	}
	states, err := db.LookUpInserted(t.Context(), table, []Row{row("5"), row("6")})
	must(t, err)
	if states[0].Publish() || !states[1].Publish() {
		t.Errorf("a delivered row and a new one are %+v", states)
	}
}

// TestAttachedBesideAWholeSearch: a whole search has read the table without a partition. That is attached, and the progress, which was void,
// becomes void again. The search writes nothing of what it found.
func TestAttachedBesideAWholeSearch(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 10) g`)
	exec(`ALTER TABLE public.outbox_events DETACH PARTITION public.outbox_events_1000000`)
	must(t, db.Know(t.Context(), table, "source"))
	exec(`UPDATE public.outbox_known SET unsettled = DEFAULT`)
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
		must(t, err)
		t.Cleanup(func() { conn.Close(context.Background()) })
		return conn
	}
	other, looker := connect(), connect()
	exec(`SET lock_timeout = '1min'`)
	var path, search string
	must(t, db.Conn().QueryRow(t.Context(), `SELECT current_setting('walpost.search_path'), current_setting('search_path')`).Scan(&path, &search))
	_, err := other.Exec(t.Context(), `SELECT set_config('walpost.search_path', $1, false), set_config('search_path', $2, false)`, path, search)
	must(t, err)
	_, err = other.Exec(t.Context(), `BEGIN; LOCK TABLE public.outbox_known IN EXCLUSIVE MODE`)
	must(t, err)
	done := make(chan error, 1)
	go func() {
		timeless := *table
		timeless.Layout.Columns[outbox.AvailableAt] = ""
		ok, err := db.take(t.Context(), &timeless, step{to: 10, ended: 10}, &Advance{})
		t.Log("the progress was written:", ok)
		done <- err
	}()
	for waits := false; !waits; time.Sleep(5 * time.Millisecond) {
		must(t, looker.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'public.outbox_known'::regclass AND NOT granted)`).Scan(&waits))
	}
	_, err = other.Exec(t.Context(), `ALTER TABLE public.outbox_events ATTACH PARTITION public.outbox_events_1000000 FOR VALUES FROM (MINVALUE) TO (1000001)`)
	must(t, err)
	// what Know does
	var n int
	must(t, other.QueryRow(t.Context(), db.own.knowSQL(table), table.String(), table.Where, table.Relation(), "source", table.OID).Scan(&n))
	_, err = other.Exec(t.Context(), `COMMIT`)
	must(t, err)
	must(t, <-done)
	var unsettled string
	must(t, looker.QueryRow(t.Context(), `SELECT unsettled::text FROM public.outbox_known`).Scan(&unsettled))
	pending, err := db.PendingCount(t.Context(), table, 100)
	must(t, err)
	if pending != 10 {
		t.Errorf("%d rows are pending, want 10; unsettled %s", pending, unsettled)
	}
}

// TestPartOfAPartitionMeanwhile: a partition of a partition comes off while a statement waits for a lock, and back on while it is planned.
func TestPartOfAPartitionMeanwhile(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(`DROP TABLE public.outbox_events_1000000`)
	exec(`CREATE TABLE public.two PARTITION OF public.outbox_events FOR VALUES FROM (MINVALUE) TO (1000001) PARTITION BY RANGE (id)`)
	exec(`CREATE TABLE public.sub PARTITION OF public.two FOR VALUES FROM (MINVALUE) TO (1000001)`)
	exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 10) g`)
	must(t, db.Know(t.Context(), table, "source"))
	exec(`INSERT INTO public.outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,11)}', now() - interval '1 day'); UPDATE public.outbox_known SET unsettled = '{[11,)}'`)
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
		must(t, err)
		t.Cleanup(func() { conn.Close(context.Background()) })
		return conn
	}
	journal, last, looker := connect(), connect(), connect()
	run := func(conn *pgx.Conn, sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		must(t, err)
	}
	waitsFor := func(name string) {
		for waits := false; !waits; time.Sleep(5 * time.Millisecond) {
			must(t, looker.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = '`+name+`'::regclass AND NOT granted)`).Scan(&waits))
		}
	}
	exec(`SET lock_timeout = '1min'`)
	run(journal, `BEGIN; LOCK TABLE public.outbox_journal IN ACCESS EXCLUSIVE MODE`)
	done := make(chan error, 1)
	var entries int
	var rows int64
	go func() {
		var err error
		entries, rows, err = db.DeleteJournaled(t.Context(), table, time.Now(), 10)
		done <- err
	}()
	waitsFor("public.outbox_journal")
	run(looker, `SET lock_timeout = '200ms'`)
	if _, err := looker.Exec(t.Context(), `ALTER TABLE public.two DETACH PARTITION public.sub`); err == nil {
		run(last, `BEGIN; LOCK TABLE public.outbox_events_rest IN ACCESS EXCLUSIVE MODE`)
		run(journal, `COMMIT`)
		waitsFor("public.outbox_events_rest")
		run(looker, `ALTER TABLE public.two ATTACH PARTITION public.sub FOR VALUES FROM (MINVALUE) TO (1000001)`)
		run(last, `COMMIT`)
	} else if pg.Code(err) != pgerrcode.LockNotAvailable { // else it waits, and so cannot come off
		t.Fatal(err)
	} else {
		run(journal, `COMMIT`)
	}
	must(t, <-done)
	var left, there int
	must(t, looker.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM public.outbox_journal), (SELECT count(*) FROM public.outbox_events)`).Scan(&left, &there))
	t.Logf("deleted %d entries, %d rows; %d entries and %d rows are left", entries, rows, left, there)
	if there > 0 && left == 0 {
		t.Errorf("%d delivered rows have no entry any more", there)
	}
}
