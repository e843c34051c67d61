package retention_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

const insertEvents = `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
	SELECT 'order', i::text, 'order.created', '{}' FROM generate_series(1, $1) i`

// newAppend is a database with an append-only outbox of one partition.
func newAppend(t *testing.T, pg *testenv.Postgres) *bench {
	t.Helper()
	b := &bench{t: t}
	b.table = &outbox.Table{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
	b.url = pg.CopyDB(t, "append", b.migrate)
	b.app = b.connect()
	b.exec(`DROP TABLE outbox_events_1000000, outbox_events_2000000, outbox_events_rest;
		CREATE TABLE outbox_events_rest PARTITION OF outbox_events FOR VALUES FROM (MINVALUE) TO (MAXVALUE);
		CREATE VIEW parts AS SELECT string_agg(concat(c.relname, substring(pg_get_expr(relpartbound, c.oid) FROM 11)), ', ' ORDER BY c.relname <> 'outbox_events_rest', c.oid) AS has
			FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'outbox_events'::regclass`)
	return b
}

// TestRanges: partitions are cut ahead of the ids, and those whose rows are delivered and old are dropped.
func TestRanges(t *testing.T) {
	retention.SetLeastRange(100)
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppend(t, pg)
		created := func(want ...string) {
			t.Helper()
			if r := b.retain(); !slices.Equal(r.Created, want) || len(r.Complaints()) > 0 {
				t.Errorf("created %q, want %q; %v", r.Created, want, r.Complaints())
			}
		}
		created("outbox_events_100", "outbox_events_200")
		b.wantText("partitions", `SELECT has FROM parts`, "outbox_events_rest FROM ('201') TO (MAXVALUE), outbox_events_100 FROM (MINVALUE) TO ('101'), outbox_events_200 FROM ('101') TO ('201')")
		created()
		b.exec(insertEvents, 150)
		created("outbox_events_300", "outbox_events_400")
		b.exec(insertEvents, 300) // some are beyond what was cut
		created("outbox_events_1450")
		b.wantText("the last partition", `SELECT substring(has FROM '^[^,]*') FROM parts`, "outbox_events_rest FROM ('1451') TO (MAXVALUE)")
		b.wantText("rows", `SELECT concat(count(*), ' ', count(*) FILTER (WHERE tableoid = 'outbox_events_1450'::regclass)) FROM outbox_events`, "450 50")
		b.wantText("constraints that are left", `SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'`, "0")
		b.wantText("partitions without the trigger", `SELECT count(*) FROM pg_inherits i WHERE inhparent = 'outbox_events'::regclass AND NOT EXISTS (
			SELECT FROM pg_trigger g WHERE g.tgrelid = i.inhrelid AND g.tgname = 'outbox_no_update' AND g.tgenabled = 'A')`, "0")

		drop := func(want ...string) {
			t.Helper()
			r := b.retain(func(o *retention.Options) { o.DeleteAfter = time.Hour })
			if !slices.Equal(r.Dropped, want) || len(r.Complaints()) > 0 {
				t.Errorf("dropped %q, want %q; %v", r.Dropped, want, r.Complaints())
			}
		}
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'stored', int8multirange(int8range(n, n + 50)), now() - interval '2 hours' FROM generate_series(1, 401, 50) n`)
		drop() // the progress does not say so yet
		b.exec(testenv.SettledTo("public.outbox_events", 450, ""))
		b.exec(`INSERT INTO outbox_deferred (outbox, id, last_error) VALUES ('public.outbox_events', 150, 'held: x')`)
		drop("outbox_events_100")
		b.exec(`DELETE FROM outbox_deferred; UPDATE outbox_journal SET processed_at = now() WHERE ids @> 300::bigint`)
		drop("outbox_events_200")
		b.exec(`UPDATE outbox_journal SET processed_at = now() - interval '2 hours'`)
		drop("outbox_events_300", "outbox_events_400")
		b.wantText("entries that are left", `SELECT string_agg(ids::text, ' ') FROM outbox_journal`, "{[401,451)}")
		b.wantText("rows that are left", `SELECT count(*) FROM outbox_events`, "50")
	})
}

// TestRangesUnderLoad: no INSERT fails while partitions are cut and dropped, and no row is lost.
func TestRangesUnderLoad(t *testing.T) {
	retention.SetLeastRange(5000)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.exec(testenv.SettledTo("public.outbox_events", 0, ""))
	partitions := testenv.PartitionsOf("outbox_events")
	b.exec(`UPDATE outbox_known SET partitions = ` + partitions)
	ctx, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop()
	for range 4 {
		conn := b.connect()
		writers.Go(func() {
			for ctx.Err() == nil {
				if _, err := conn.Exec(context.Background(), insertEvents, 7); err != nil {
					t.Errorf("insert: %v", err)
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	created, dropped := 0, 0
	for begun := time.Now(); created < 10 && time.Since(begun) < testenv.Patience; {
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'stored', int8multirange(int8range(j.done, greatest(j.done, e.last - 6000))), now() - interval '23 hours' + e.last * interval '0.5 second'
			FROM (SELECT max(id) AS last FROM outbox_events) e, (SELECT coalesce(max(upper(range_merge(ids))), 0) AS done FROM outbox_journal) j`)
		b.exec(`UPDATE outbox_known SET unsettled = (SELECT int8multirange(int8range(coalesce(max(id), 0) - 6000, NULL, '()')) FROM outbox_events)`)
		r := b.retain(func(o *retention.Options) { o.DeleteAfter = time.Hour })
		created, dropped = created+len(r.Created), dropped+len(r.Dropped)
	}
	stop()
	writers.Wait()
	b.wantText("rows of outbox_known with the partitions that there are now", `SELECT count(*) FROM outbox_known WHERE partitions = `+partitions, "1")
	if created < 10 || dropped == 0 {
		t.Errorf("%d partitions were created, and %d dropped", created, dropped)
	}
	// No insert was rolled back, so there are no gaps.
	b.wantText("ids without a row", `SELECT max(id) - min(id) + 1 - count(*) FROM outbox_events`, "0")
}

// TestRangesWaitPolitely: a transaction that stays open keeps partitions from being cut, and no producer waits for longer
// than a lock is tried. What a pass that was broken off has left is taken away.
func TestRangesWaitPolitely(t *testing.T) {
	retention.SetLeastRange(100)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.exec(insertEvents, 10)
	producer, err := b.connect().Begin(t.Context())
	b.must(err)
	_, err = producer.Exec(t.Context(), insertEvents, 1)
	b.must(err)
	r := b.retain()
	if len(r.Created) > 0 || len(r.Notes) == 0 || !strings.Contains(r.Notes[0], "left to the next pass") {
		t.Errorf("beside an open transaction: %+v", r)
	}
	b.must(producer.Commit(t.Context()))
	if r := b.retain(); !slices.Equal(r.Created, []string{"outbox_events_1011"}) {
		t.Errorf("after it: %+v", r)
	}
	b.exec(insertEvents, 850)
	b.exec(`ALTER TABLE outbox_events_rest ADD CONSTRAINT walpost_bounds CHECK (id < 5000) NOT VALID;
		ALTER TABLE outbox_events_rest RESET (autovacuum_vacuum_insert_threshold, toast.autovacuum_vacuum_insert_threshold)`)
	if r := b.retain(); !slices.Equal(r.Created, []string{"outbox_events_1111"}) {
		t.Errorf("before an empty last partition: %+v", r)
	}
	b.wantText("constraints and parameters", `SELECT concat((SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'), reloptions)
		FROM pg_class WHERE relname = 'outbox_events_1111'`, "0{autovacuum_vacuum_insert_threshold=-1}")

	b.exec(`DO $$ BEGIN CREATE ROLE stranger LOGIN; EXCEPTION WHEN duplicate_object THEN END $$;
		GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO stranger`)
	b.url = testenv.SharedPostgres(t).URLFor("stranger", b.text(`SELECT current_database()`))
	if r := b.retain(); !slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, "does not own public.outbox_events") }) {
		t.Errorf("of a role that does not own the table: %+v", r)
	}
}

// TestDropOfALargePartition prints how long producers that commit 1,000 rows a second wait while a partition with many rows is
// dropped, and without that. It asserts nothing about times.
func TestDropOfALargePartition(t *testing.T) {
	rows, _ := strconv.Atoi(os.Getenv("WALPOST_LARGE_ROWS"))
	if rows == 0 {
		t.Skip("WALPOST_LARGE_ROWS says how many rows the partition has, on a quiet machine with space for them")
	}
	pg := testenv.NewPostgres(t, testenv.PGOptions{FSync: true, Settings: map[string]string{
		"shared_buffers": "1GB", "max_wal_size": "4GB", "log_lock_waits": "on", "deadlock_timeout": "5ms",
	}})
	b := newAppend(t, pg)
	b.exec(`DROP TABLE outbox_events_rest`)
	const parts = 3
	for i := range parts {
		b.exec(fmt.Sprintf(`CREATE TABLE outbox_events_%d PARTITION OF outbox_events FOR VALUES FROM (%d) TO (%d)`, i, 1+i*rows, 1+(i+1)*rows))
	}
	b.exec(fmt.Sprintf(`CREATE TABLE outbox_events_rest PARTITION OF outbox_events FOR VALUES FROM (%d) TO (MAXVALUE)`, 1+parts*rows))
	for range parts {
		b.exec(insertEvents, rows)
	}
	b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
		SELECT 'public.outbox_events', 'stored', int8multirange(int8range(g, g + 1000)), now() - interval '2 hours' FROM generate_series(1, $1::bigint, 1000) g`, parts*rows)
	b.exec(testenv.SettledTo("public.outbox_events", int64(parts*rows), ""))
	b.exec(`CHECKPOINT`)
	retention.SetLeastRange(int64(rows))
	longest := func(beside func()) (waits []time.Duration) {
		ctx, stop := context.WithCancel(t.Context())
		var mu sync.Mutex
		var writers sync.WaitGroup
		for range 10 {
			conn := b.connect()
			writers.Go(func() {
				for tick := time.NewTicker(10 * time.Millisecond); ctx.Err() == nil; <-tick.C {
					begun := time.Now()
					if _, err := conn.Exec(context.Background(), insertEvents, 1); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					waits = append(waits, time.Since(begun))
					mu.Unlock()
				}
			})
		}
		time.Sleep(time.Second)
		beside()
		time.Sleep(time.Second)
		stop()
		writers.Wait()
		slices.Sort(waits)
		return waits
	}
	report := func(what string, waits []time.Duration) {
		t.Logf("%s: %d commits, p99 %s, longest %s", what, len(waits), waits[len(waits)*99/100], waits[len(waits)-1])
	}
	report("without", longest(func() { time.Sleep(5 * time.Second) }))
	var r *retention.Report
	begun := time.Now()
	waits := longest(func() {
		begun = time.Now()
		r = b.retain(func(o *retention.Options) { o.DeleteAfter = time.Hour })
		t.Logf("the pass takes %s", time.Since(begun).Round(time.Millisecond))
	})
	report(fmt.Sprintf("beside %d partitions of %d rows that are dropped, %q created", len(r.Dropped), rows, r.Created), waits)
	t.Logf("producers have waited %d times for a lock for more than 5 ms", strings.Count(pg.Log(), "still waiting for RowExclusiveLock"))
	if len(r.Dropped) != parts || len(r.Complaints()) > 0 {
		t.Errorf("report %+v", r)
	}
}

// TestRangesBelongToTheOwner of the table, whoever cuts them, and have what the partition has from which they are cut: the owner goes on
// with them.
func TestRangesBelongToTheOwner(t *testing.T) {
	retention.SetLeastRange(100)
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppend(t, pg)
		role := "owner_" + b.text(`SELECT current_database()`)
		b.exec(`CREATE ROLE ` + role + ` LOGIN; DROP TABLE idempotency_keys`)
		t.Cleanup(func() {
			_, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+` CASCADE; DROP TABLESPACE IF EXISTS `+role+`; DROP ROLE `+role)
		})
		b.exec(fmt.Sprintf(`GRANT ALL ON SCHEMA public TO %[1]s;
			GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_journal, outbox_deferred, outbox_known TO %[1]s;
			DO $$ BEGIN CREATE ROLE ranges_reader; EXCEPTION WHEN duplicate_object THEN END $$;
			GRANT SELECT ON outbox_events_rest TO ranges_reader; GRANT UPDATE (payload) ON outbox_events_rest TO ranges_reader;
			ALTER TABLE outbox_events_rest REPLICA IDENTITY FULL;
			CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON outbox_events_rest FOR EACH STATEMENT EXECUTE FUNCTION outbox_append_only();
			ALTER TABLE outbox_events_rest ENABLE ALWAYS TRIGGER outbox_no_truncate;
			CREATE TRIGGER "a ON public.outbox_events ; SELECT 1/0; --" BEFORE TRUNCATE ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION outbox_append_only('it''s \ é', 'b');
			ALTER TABLE outbox_events OWNER TO %[1]s; ALTER TABLE outbox_events_rest OWNER TO %[1]s`, role))
		space := ""
		if b.text(`SELECT current_setting('server_version_num')::int >= 150000`) == "true" {
			space = role
			b.exec(`SET allow_in_place_tablespaces = on`)
			b.exec(`CREATE TABLESPACE ` + role + ` LOCATION ''`)
			b.exec(fmt.Sprintf(`GRANT CREATE ON TABLESPACE %[1]s TO %[1]s; ALTER TABLE outbox_events_rest SET TABLESPACE %[1]s`, role))
		}
		all := func(partitions string) {
			t.Helper()
			b.wantText("partitions", `SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox_events'::regclass`, partitions)
			b.wantText("what they have", `SELECT string_agg(DISTINCT concat_ws(' ', pg_get_userbyid(c.relowner), c.relreplident, s.spcname, has_table_privilege('ranges_reader', c.oid, 'SELECT'),
					has_column_privilege('ranges_reader', c.oid, 'payload', 'UPDATE'), has_column_privilege('ranges_reader', c.oid, 'event_type', 'UPDATE'),
					(SELECT count(*) FROM pg_trigger g WHERE g.tgrelid = c.oid AND g.tgname IN ('outbox_no_update', 'outbox_no_truncate') AND g.tgenabled = 'A')), ', ')
				FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid LEFT JOIN pg_tablespace s ON s.oid = c.reltablespace WHERE i.inhparent = 'outbox_events'::regclass`,
				strings.Join(strings.Fields(role+" f "+space+" t t f 2"), " "))
		}
		all("1")
		b.retain() // as a superuser
		all("3")
		b.wantText("another trigger", `SELECT string_agg(substring(pg_get_triggerdef(oid) FROM ' EXECUTE .*'), '') FROM pg_trigger
			WHERE tgrelid = 'outbox_events_100'::regclass AND tgname LIKE 'a ON %'`, ` EXECUTE FUNCTION outbox_append_only('it''s \ é', 'b')`)
		b.exec(insertEvents, 450) // the last partition has rows
		b.retain()
		all("4")
		b.exec(testenv.SettledTo("public.outbox_events", 450, ""))
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,451)}', now() - interval '2 hours')`)
		cfg := b.config()
		cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
		r, err := retention.Run(t.Context(), cfg, retention.Options{Tables: []*outbox.Table{b.table}, DeleteAfter: time.Hour})
		b.must(err)
		if !slices.Equal(r.Dropped, []string{"outbox_events_100", "outbox_events_200"}) || len(r.Complaints()) > 0 {
			t.Errorf("as the owner: %+v", r)
		}
	})
}

// TestRangesOfExcludedRows: a partition goes when every row in it has an entry that is old, whoever wrote it. Rows that `where`
// excludes keep it, for as long as excluded_after says.
func TestRangesOfExcludedRows(t *testing.T) {
	retention.SetLeastRange(100)
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppend(t, pg)
		b.retain()
		b.exec(insertEvents, 450)
		b.retain()
		b.table.Where, b.table.Filter = `event_type <> 'order.draft'`, outbox.RowAlias+`.event_type <> 'order.draft'`
		b.exec(`ALTER TABLE outbox_events DISABLE TRIGGER outbox_no_update; UPDATE outbox_events SET event_type = 'order.draft' WHERE id IN (150, 160);
			ALTER TABLE outbox_events ENABLE ALWAYS TRIGGER outbox_no_update`)
		b.exec(testenv.SettledTo("public.outbox_events", 450, ""))
		b.exec(`UPDATE outbox_known SET condition = $1`, b.table.Where)
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) SELECT 'public.outbox_events', 'stored', int8multirange(int8range(1, 450))
			- int8multirange(int8range(150, 151), int8range(160, 161)), now() - interval '2 hours'`)
		db, err := table.Open(t.Context(), b.config())
		b.must(err)
		t.Cleanup(db.Close)
		b.must(errors.Join(db.Bind(t.Context(), b.table), db.Complete(t.Context(), b.table)))
		drop := func(after time.Duration, kept []retention.Kept, dropped ...string) {
			t.Helper()
			r := b.retain(func(o *retention.Options) { o.DeleteAfter, o.ExcludedAfter = time.Hour, after })
			if !slices.Equal(r.Dropped, dropped) || !slices.Equal(r.Kept, kept) || len(r.Complaints()) > 0 {
				t.Errorf("dropped %q, want %q; kept %v, want %v; %v", r.Dropped, dropped, r.Kept, kept, r.Complaints())
			}
			found, err := retention.FindKept(t.Context(), db, b.table, retention.Options{DeleteAfter: time.Hour, ExcludedAfter: after})
			if err != nil || !slices.Equal(found, kept) {
				t.Errorf("found %v: %v, want %v", found, err, kept)
			}
		}
		of := func(rows, first int64) []retention.Kept {
			return []retention.Kept{{Partition: "outbox_events_200", Rows: rows, First: first}}
		}
		drop(0, of(2, 150), "outbox_events_100")
		drop(time.Hour, of(2, 150))
		b.wantText("rows", `SELECT count(*) FROM outbox_events WHERE event_type = 'order.draft'`, "2")
		// The relay of another condition has delivered one of them.
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[150,150]}', now() - interval '2 hours')`)
		drop(0, of(1, 160))
		b.exec(`ALTER TABLE outbox_events DISABLE TRIGGER outbox_no_update; UPDATE outbox_events SET occurred_at = now() - interval '2 hours' WHERE id = 160;
			ALTER TABLE outbox_events ENABLE ALWAYS TRIGGER outbox_no_update`)
		drop(3*time.Hour, of(1, 160))
		drop(time.Hour, []retention.Kept{}, "outbox_events_200")
		b.wantText("rows that are left", `SELECT count(*) FROM outbox_events WHERE id < 201`, "0")
	})
}

// TestRangeSizes: the size of a partition follows what the last ones took, by the times of the marks and by bounded steps. One that
// takes ids for days is ended.
func TestRangeSizes(t *testing.T) {
	retention.SetLeastRange(1000)
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppend(t, pg)
		last := 0
		insert := func(rows int, marked string) {
			t.Helper()
			b.exec(insertEvents, rows)
			b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
				SELECT 'public.outbox_events', 'stored', int8multirange(int8range(g, least(g + 500, $2 + 1))), now() - $3::interval
				FROM generate_series($1::int, $2::int, 500) g`, last+1, last+rows, marked)
			last += rows
		}
		created := func(what string, want ...string) {
			t.Helper()
			if r := b.retain(); !slices.Equal(r.Created, want) || len(r.Complaints()) > 0 {
				t.Errorf("%s: created %q, want %q; %v", what, r.Created, want, r.Complaints())
			}
		}
		created("at first", "outbox_events_1000", "outbox_events_2000")
		insert(1000, "3 seconds")
		insert(1000, "2 seconds")
		insert(150_000, "1 second")
		created("after a burst", "outbox_events_162000")
		insert(10_000, "0 seconds")
		created("after the next rows", "outbox_events_164000", "outbox_events_166000")
		b.exec(`UPDATE outbox_journal SET processed_at = now() - interval '60 hours' WHERE ids && int8multirange(int8range(2001, 162001))`)
		insert(100, "50 hours")
		created("a partition that takes ids for days", "outbox_events_246000", "outbox_events_326000", "outbox_events_163100")
		b.wantText("the partition, and what it has left", `SELECT string_agg(concat(relname, substring(pg_get_expr(relpartbound, oid) FROM 11)), ', ' ORDER BY relname)
			FROM pg_class WHERE relname IN ('outbox_events_163100', 'outbox_events_164000')`,
			"outbox_events_163100 FROM ('162001') TO ('163101'), outbox_events_164000 FROM ('163101') TO ('164001')")
		created("at once again")
		b.exec(`SELECT setval(pg_get_serial_sequence('outbox_events', 'id'), 5000000000)`)
		created("ids that jump", "outbox_events_5000079999", "outbox_events_5000159999", "outbox_events_5000239999")
		b.exec(`SELECT setval(pg_get_serial_sequence('outbox_events', 'id'), 9223372036854775800)`)
		if r := b.retain(); len(r.Created) > 0 || len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "come to their end") {
			t.Errorf("the last ids: %+v", r)
		}
	})
}

// TestCutTwice: no pass was made for two days, and the last partition has all rows. One pass cuts it, and again.
func TestCutTwice(t *testing.T) {
	retention.SetLeastRange(100)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.exec(insertEvents, 450)
	b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,451)}', now() - interval '2 days')`)
	b.deliveredTo(450)
	r, err := retention.Run(t.Context(), b.config(), retention.Options{Tables: []*outbox.Table{b.table}, DeleteAfter: 72 * time.Hour})
	if err != nil || len(r.Complaints()) > 0 {
		t.Errorf("%v %q", err, r.Complaints())
	}
	b.wantText("partitions", `SELECT has FROM parts`, "outbox_events_rest FROM ('1451') TO (MAXVALUE), outbox_events_550 FROM (MINVALUE) TO ('551'), outbox_events_1450 FROM ('551') TO ('1451')")
}

// delivered has every row so far delivered, as a relay that has seen the present partitions.
func (b *bench) deliveredTo(id int) {
	b.t.Helper()
	b.exec(testenv.SettledTo("public.outbox_events", int64(id), ""))
	b.exec(`UPDATE outbox_known k SET partitions = ` + testenv.PartitionsOf("outbox_events") + `,
		unsettled = unsettled - '{[1,` + strconv.Itoa(id) + `]}'`)
}

// TestPartitionDetachedDuringAPass: a pass waits for a reader before it drops partitions, and somebody detaches one meanwhile. It
// keeps that, although the relay knows of it already. A table of its name is not dropped either.
func TestPartitionDetachedDuringAPass(t *testing.T) {
	retention.SetLeastRange(100)
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppend(t, pg)
		b.retain()
		b.exec(insertEvents, 450)
		b.retain()
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,451)}', now() - interval '2 hours')`)
		b.deliveredTo(450)
		t.Cleanup(retention.SetRangeTries(10_000))
		reader := b.session(`BEGIN; SELECT FROM outbox_events_100 LIMIT 1`)
		reports := make(chan *retention.Report, 1)
		go func() {
			r, err := retention.Run(t.Context(), b.config(), retention.Options{Tables: []*outbox.Table{b.table}, DeleteAfter: time.Hour})
			if err != nil {
				t.Error(err)
			}
			reports <- r
		}()
		b.until("the pass waits for the reader", `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'outbox_events_100'::regclass AND NOT granted AND mode = 'AccessExclusiveLock')`)
		b.exec(`ALTER TABLE outbox_events DETACH PARTITION outbox_events_200`)
		b.deliveredTo(450)
		reader()
		if r := <-reports; !slices.Equal(r.Dropped, []string{"outbox_events_100"}) {
			t.Errorf("dropped %q, %v", r.Dropped, r.Complaints())
		} else if notes := fmt.Sprint(r.Notes); !strings.Contains(notes, "partition outbox_events_200 of public.outbox_events stays") {
			t.Errorf("the notes are %s", notes)
		}
		b.wantText("rows of the detached partition", `SELECT count(*) FROM outbox_events_200`, "100")
	})
}

// session runs statements on a connection of its own, until end is called.
func (b *bench) session(sql string) (end func()) {
	b.t.Helper()
	conn := b.connect()
	_, err := conn.Exec(b.t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	b.must(err)
	return func() { b.must(conn.Close(b.t.Context())) }
}

func (b *bench) until(what, sql string) {
	b.t.Helper()
	for begun := time.Now(); b.text(sql) != "true"; time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > testenv.Patience {
			b.t.Fatalf("waited in vain until %s", what)
		}
	}
}

// TestConstraintThatACutHasLeft, as one does whose process is killed, refuses rows: the next pass takes it away, however long a
// reader is in its way.
func TestConstraintThatACutHasLeft(t *testing.T) {
	retention.SetLeastRange(100)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.retain()
	b.exec(`ALTER TABLE outbox_events ADD CONSTRAINT walpost_bounds CHECK (id > 0)`) // a person's, of the same name
	if r := b.retain(); len(r.Complaints()) > 0 {
		t.Errorf("beside another constraint of that name: %q", r.Complaints())
	}
	b.exec(`ALTER TABLE outbox_events DROP CONSTRAINT walpost_bounds`)
	b.exec(`ALTER TABLE outbox_events_rest ADD CONSTRAINT walpost_bounds CHECK (id < 300) NOT VALID`)
	reader := b.session(`BEGIN; SELECT FROM outbox_events LIMIT 1`)
	t.Cleanup(retention.SetRangeTries(1))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if r, err := b.tryRetain(t.Context()); err != nil || len(r.Complaints()) > 0 {
			t.Errorf("%v, %v", err, r.Complaints())
		}
	}()
	for range 3 {
		b.until("the pass waits for the reader", `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'outbox_events_rest'::regclass AND NOT granted)`)
		b.until("it has given up", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE relation = 'outbox_events_rest'::regclass AND NOT granted)`)
	}
	reader()
	<-ended
	b.wantText("constraints", `SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'`, "0")
}

// TestEntriesOfDroppedPartitions go, also where the pass that has dropped them did not come to it, and where no partition can be cut
// because a table has its name.
func TestEntriesOfDroppedPartitions(t *testing.T) {
	retention.SetLeastRange(100)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.retain()
	b.exec(insertEvents, 350)
	b.retain()
	b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) SELECT 'public.outbox_events', 'stored', int8multirange(int8range(n, n + 70)), now() - interval '2 hours' FROM generate_series(1, 281, 70) n`)
	b.deliveredTo(350)
	drop := func(o *retention.Options) { o.DeleteAfter = time.Hour }
	reader := b.session(`BEGIN; LOCK TABLE outbox_journal IN SHARE MODE`)
	if r := b.retain(drop); !slices.Equal(r.Dropped, []string{"outbox_events_100"}) || len(r.Notes) != 1 {
		t.Errorf("beside a reader of the journal: dropped %q, %q", r.Dropped, r.Notes)
	}
	b.wantText("entries", `SELECT range_agg(r)::text FROM outbox_journal, unnest(ids) r`, "{[1,351)}")
	reader()
	b.exec(`DO $$ BEGIN FOR n IN 1500..2000 LOOP EXECUTE 'CREATE TABLE outbox_events_' || n || ' ()'; END LOOP; END $$`)
	b.exec(`SELECT setval('outbox_events_id_seq', 1500)`)
	r, err := b.tryRetain(t.Context(), drop)
	if err == nil || !strings.Contains(err.Error(), "already exists") || !slices.Equal(r.Dropped, []string{"outbox_events_200"}) {
		t.Errorf("beside a table of the next name: dropped %q, %v", r.Dropped, err)
	}
	b.wantText("entries", `SELECT range_agg(r)::text FROM outbox_journal, unnest(ids) r`, "{[201,351)}")
	b.wantText("ids to be forgotten", `SELECT string_agg(dropped::text, ' ') FROM outbox_known`, "{}")
}

// TestRangesInAnotherSchema: a filled partition is cut where it is.
func TestRangesInAnotherSchema(t *testing.T) {
	retention.SetLeastRange(100)
	b := newAppend(t, testenv.SharedPostgres(t))
	b.exec(`CREATE SCHEMA "the parts"; ALTER TABLE outbox_events_rest SET SCHEMA "the parts"`)
	b.exec(insertEvents, 50)
	b.retain()
	b.wantText("partitions", `SELECT string_agg(concat(n.nspname, '.', c.relname), ' ' ORDER BY c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
		JOIN pg_namespace n ON n.oid = c.relnamespace WHERE inhparent = 'outbox_events'::regclass`, "the parts.outbox_events_1050 the parts.outbox_events_rest")
	b.exec(insertEvents, 1000)
	b.wantText("rows", `SELECT count(*) FROM outbox_events`, "1050")
}

// TestPartitionsThatStay: what keeps a partition from being dropped or cut, and the later ones or not, is said with what helps.
func TestPartitionsThatStay(t *testing.T) {
	retention.SetLeastRange(100)
	ready := func(t *testing.T) *bench {
		b := newAppend(t, testenv.SharedPostgres(t))
		b.retain()
		b.exec(insertEvents, 450)
		b.retain()
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at) VALUES ('public.outbox_events', 'stored', '{[1,301)}', now() - interval '2 hours')`)
		b.deliveredTo(450)
		return b
	}
	drop := func(o *retention.Options) { o.DeleteAfter = time.Hour }
	t.Run("a view", func(t *testing.T) {
		b := ready(t)
		b.exec(`CREATE VIEW report AS SELECT * FROM outbox_events_100`)
		r := b.retain(drop)
		if notes := fmt.Sprint(r.Complaints()); !slices.Equal(r.Dropped, []string{"outbox_events_200"}) ||
			!strings.Contains(notes, "partition outbox_events_100 of public.outbox_events stays until what needs it is dropped: view public.report depends on table public.outbox_events_100") {
			t.Errorf("dropped %q; %s", r.Dropped, notes)
		}
	})
	t.Run("another role", func(t *testing.T) {
		b := ready(t)
		owner := "owner_of_" + b.text(`SELECT current_database()`)
		b.exec(`CREATE ROLE ` + owner + ` LOGIN; GRANT ALL ON SCHEMA public TO ` + owner)
		b.exec(`DO $$ DECLARE name text; BEGIN
			FOR name IN SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relname <> 'outbox_events_100'
			LOOP EXECUTE format('ALTER TABLE %s OWNER TO ` + owner + `', name); END LOOP; END $$; GRANT SELECT ON outbox_events_100 TO ` + owner)
		cfg := b.config()
		cfg.URL = strings.Replace(cfg.URL, "postgres@", owner+"@", 1)
		r, err := retention.Run(t.Context(), cfg, retention.Options{Tables: []*outbox.Table{b.table}, DeleteAfter: time.Hour})
		b.must(err)
		if notes := fmt.Sprint(r.Complaints()); !slices.Equal(r.Dropped, []string{"outbox_events_200"}) || !strings.Contains(notes, "partition outbox_events_100 of public.outbox_events stays: ") {
			t.Errorf("dropped %q; %s", r.Dropped, notes)
		}
	})
	t.Run("another condition", func(t *testing.T) {
		b := ready(t)
		b.exec(`INSERT INTO outbox_known (outbox, condition, system_id, database_oid, own_oid, table_oid, timeline, partitions, table_name, source, unsettled)
			SELECT outbox, 'tenant_id = ''2''', system_id, database_oid, own_oid, table_oid, timeline, partitions, table_name, source, '{[150,)}' FROM outbox_known`)
		r := b.retain(drop)
		if kept := fmt.Sprint(r.Kept); !slices.Equal(r.Dropped, []string{"outbox_events_100"}) ||
			!strings.Contains(kept, `outbox_events_200 is kept, and later ones: the progress of outboxes[].where "tenant_id = '2'" has not come so far`) {
			t.Fatalf("dropped %q; kept %s", r.Dropped, kept)
		}
		b.exec(r.Kept[0].Fix(&outbox.Table{Known: "public.outbox_events", Journal: outbox.Journal{Known: "outbox_known"}})[len("if no relay has that condition any more: "):])
		if r := b.retain(drop); !slices.Equal(r.Dropped, []string{"outbox_events_200"}) || len(r.Kept) > 0 {
			t.Errorf("dropped %q; kept %v", r.Dropped, r.Kept)
		}
	})
	t.Run("a row far ahead", func(t *testing.T) {
		b := ready(t)
		b.exec(`INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE SELECT 300000, 1, 'order', '1', 'order.placed', '{}'`)
		b.exec(insertEvents, 3000)
		_, err := b.tryRetain(t.Context())
		if want := "rows of outbox_events_rest have ids far ahead of the sequence"; err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("%v, want %q", err, want)
		}
		_, fix, ok := strings.Cut(hint.Of(err), "when they are delivered: ")
		if !ok {
			t.Fatalf("hint %q", hint.Of(err))
		}
		b.exec(fix)
		if r := b.retain(); len(r.Created) == 0 || len(r.Complaints()) > 0 {
			t.Errorf("created %q; %v", r.Created, r.Complaints())
		}
	})
}
