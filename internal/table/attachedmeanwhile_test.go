package table

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		db, table, exec := withJournal(t, pg)
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
