package retention_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// retain makes a pass: a row that was processed an hour ago is old.
func (b *bench) retain(change ...func(*retention.Options)) *retention.Report {
	b.t.Helper()
	r, err := b.tryRetain(b.t.Context(), change...)
	b.must(err)
	return r
}

func (b *bench) tryRetain(ctx context.Context, change ...func(*retention.Options)) (*retention.Report, error) {
	opts := retention.Options{Tables: []*outbox.Table{b.table}, ArchiveAfter: time.Hour}
	for _, f := range change {
		f(&opts)
	}
	return retention.Run(ctx, b.config(), opts)
}

func dropAfter(d time.Duration) func(*retention.Options) {
	return func(o *retention.Options) { o.DropAfter = d }
}

const day = 24 * time.Hour

// delivered inserts rows that occurred and were processed as long ago as that.
func (b *bench) delivered(n int, occurred, processed string) {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		SELECT 'order', i, 'order.created', '{"n": 1.10}', CASE WHEN $2 LIKE '%infinity' THEN $2::timestamptz ELSE now() - $2::interval END, now() - $3::interval
		FROM generate_series(1, $1) i`, n, occurred, processed)
}

func (b *bench) wantText(what, sql, want string) {
	b.t.Helper()
	if got := b.text(sql); got != want {
		b.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// month names the archive's partition of the month that an interval leads to.
func (b *bench) month(in string) string {
	return b.text(`to_char(now() AT TIME ZONE 'UTC' + '` + in + `'::interval, '"outbox_messages_archive_"YYYY_MM')`)
}

func TestRetainMovesDeliveredRows(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.exec(`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
				processed_at, attempts, last_error, trace_id)
			VALUES (-7, 3, 'a', 4, 'b', 5, jsonb_build_object('big', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 9999) i), 'n', 1.10),
				now() - interval '40 days', now() - interval '30 days', now() - interval '61 minutes', 6, 'held', 't')`)
		whole := b.text(`SELECT to_jsonb(o) FROM outbox_messages o`)
		b.delivered(2500, "40 days", "2 hours")
		b.delivered(10, "40 days", "59 minutes") // young
		b.insert(10)                             // pending
		b.exec(`UPDATE outbox_messages SET occurred_at = now() - interval '1 year', available_at = now() - interval '1 year' WHERE processed_at IS NULL`)

		r := b.retain()
		if r.Busy || len(r.Tables) != 1 || r.Tables[0] != (retention.TableReport{Table: "public.outbox_messages", Archived: 2501}) {
			t.Errorf("report %+v", r)
		}
		want := []string{b.month("0"), b.month("1 month"), b.month("2 months"), b.month("-40 days")}
		if !slices.Equal(r.Created, want) || len(r.Notes) > 0 {
			t.Errorf("created %v, notes %v, want %v", r.Created, r.Notes, want)
		}
		b.wantText("outbox", `SELECT count(*) || ' ' || count(processed_at) FROM outbox_messages`, "20 10")
		b.wantText("archive", `SELECT count(*) || ' ' || min(outbox) || ' ' || count(DISTINCT id) FROM outbox_messages_archive`, "2501 public.outbox_messages 2501")
		b.wantText("month", `SELECT count(*) FROM `+want[3], "2501")
		b.wantText("the row", `SELECT (to_jsonb(a) - 'outbox' - 'archived_at')::text = $$`+whole+`$$ FROM outbox_messages_archive a WHERE id = -7`, "true")

		r = b.retain()
		if r.Tables[0].Archived != 0 || len(r.Created)+len(r.Notes) > 0 {
			t.Errorf("a second pass reports %+v", r)
		}
	})
}

// TestRetainTakesOddTimes: no time of an event stops a pass, and odd rows leave
// the archive in their turn.
func TestRetainTakesOddTimes(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	for _, age := range []string{"56 years", "-73 years", "-infinity", "infinity", "4 months", "-4 months"} {
		b.delivered(3, age, "2 days")
	}
	r := b.retain(dropAfter(90 * day))
	if r.Tables[0].Archived != 18 || len(r.Notes) > 0 || len(r.Created) > 4 {
		t.Errorf("report %+v", r)
	}
	b.wantText("default partition", `SELECT count(*) FROM outbox_messages_archive_default`, "18")
	b.exec(`UPDATE outbox_messages_archive SET processed_at = now() - interval '91 days' WHERE id % 3 = 0`)
	b.exec(`CREATE PUBLICATION everything FOR ALL TABLES`) // it wants a key of what is deleted
	if r = b.retain(dropAfter(90 * day)); r.Purged != 6 {
		t.Errorf("%d rows of the default partition were deleted, want 6", r.Purged)
	}
	b.wantText("default partition", `SELECT count(*) FROM outbox_messages_archive_default`, "12")
}

// TestRetainMakesWay: rows that lie in the default partition do not keep their
// month from being created, unless they are many.
func TestRetainMakesWay(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	fill := func(n int, in string) {
		b.exec(`INSERT INTO outbox_messages_archive (outbox, id, tenant_id, aggregate_id, occurred_at, processed_at)
			SELECT 'x', i, 7, 42, date_trunc('month', now(), 'UTC') + $2::interval + i * interval '1 second', now() FROM generate_series(1, $1) i`, n, in)
	}
	const unsorted = `outbox_messages_archive_default`
	b.exec(`ALTER TABLE outbox_messages_archive DETACH PARTITION ` + unsorted) // to have its columns in another order
	b.exec(`ALTER TABLE ` + unsorted + ` DROP COLUMN tenant_id, ADD COLUMN tenant_id bigint`)
	b.exec(`ALTER TABLE outbox_messages_archive ATTACH PARTITION ` + unsorted + ` DEFAULT`)
	fill(10000, "1 month")
	fill(10001, "2 months")
	r := b.retain()
	if want := []string{b.month("0"), b.month("1 month")}; !slices.Equal(r.Created, want) {
		t.Errorf("created %v, want %v", r.Created, want)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], b.month("2 months")) || !strings.Contains(r.Notes[0], "more than 10000 rows") {
		t.Errorf("notes %q", r.Notes)
	}
	b.wantText("month", `SELECT count(*) FROM `+b.month("1 month")+` WHERE tenant_id = 7 AND aggregate_id = 42`, "10000")
	b.wantText("default partition", `SELECT count(*) FROM outbox_messages_archive_default`, "10001")
	b.delivered(1, "-2 months", "2 hours")
	b.retain()
	b.wantText("default partition", `SELECT count(*) FROM outbox_messages_archive_default`, "10002")

	b.exec(`CREATE TABLE ` + b.month("-1 month") + ` ()`) // a month that somebody detached to keep it
	b.delivered(1, "1 month", "2 hours")
	if r = b.retain(); r.Tables[0].Archived != 1 || !strings.Contains(strings.Join(r.Notes, "\n"), "already exists") {
		t.Errorf("report %+v", r)
	}
}

func TestRetainTakesIDsThatComeAgain(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TABLE "Other" (LIKE outbox_messages INCLUDING ALL)`)
	other := *b.table
	other.Name = "Other"
	for range 2 {
		b.delivered(5, "2 hours", "2 hours")
		b.exec(`UPDATE outbox_messages SET occurred_at = '2026-01-01'`) // the same rows, to the last column
		b.exec(`INSERT INTO "Other" SELECT * FROM outbox_messages`)
		b.retain(func(o *retention.Options) { o.Tables = append(o.Tables, &other) })
		b.exec(`TRUNCATE outbox_messages RESTART IDENTITY`)
	}
	b.wantText("archive", `SELECT string_agg(outbox || ' ' || n, ', ') FROM (SELECT outbox, count(*) n FROM outbox_messages_archive WHERE id = 1 GROUP BY 1 ORDER BY 1) x`,
		"public.Other 2, public.outbox_messages 2")
}

func TestRetainDropsOldMonths(t *testing.T) {
	noVacuum := testenv.PGOptions{Settings: map[string]string{"autovacuum": "off"}} // it locks tables too
	testenv.ClustersWith(t, noVacuum, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.exec(`CREATE TABLE kept_by_hand PARTITION OF outbox_messages_archive FOR VALUES FROM ('2019-01-01') TO ('2020-01-01')`)
		b.exec(`CREATE TABLE all_before PARTITION OF outbox_messages_archive FOR VALUES FROM (MINVALUE) TO ('2019-01-01')`)
		b.delivered(20, "100 days", "99 days")
		b.delivered(20, "70 days", "69 days")
		b.delivered(20, "40 days", "39 days")
		b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
			VALUES ('order', 1, 'late', '{}', '2019-06-01', now() - interval '2 hours')`)
		b.insert(5)
		if r := b.retain(dropAfter(200 * day)); r.Tables[0].Archived != 61 || !slices.Equal(r.Dropped, []string{"all_before"}) {
			t.Errorf("report %+v", r)
		}
		// The month of 70 days ago has ended more than a month ago, and one of its rows was delivered late.
		b.exec(`UPDATE outbox_messages_archive SET processed_at = now() - interval '1 day' WHERE id = 21`)
		want := []string{b.month("-100 days")}
		r := b.retain(dropAfter(35 * day))
		if !slices.Equal(r.Dropped, want) || r.Purged != 0 || len(r.Notes) > 0 {
			t.Errorf("dropped %v, purged %d, notes %v, want %v", r.Dropped, r.Purged, r.Notes, want)
		}
		b.exec(`UPDATE outbox_messages_archive SET processed_at = now() - interval '36 days' WHERE id = 21 OR event_type = 'late'`)
		want = []string{"kept_by_hand", b.month("-70 days")}
		if r = b.retain(dropAfter(35 * day)); !slices.Equal(r.Dropped, want) {
			t.Errorf("dropped %v, notes %v, want %v", r.Dropped, r.Notes, want)
		}
		b.wantText("left", `SELECT (SELECT count(*) FROM outbox_messages_archive) || ' ' || (SELECT count(*) FROM outbox_messages)`, "20 5")
		if r = b.retain(); len(r.Dropped) > 0 {
			t.Errorf("dropped %v, though nothing is to be dropped", r.Dropped)
		}
	})
}

func TestRetainExpiresKeys(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token, expires_at) SELECT 0, 's', 'k' || i, '', gen_random_uuid(), now() + (i - 2500) * interval '1 minute' FROM generate_series(1, 3000) i`)
	tx, err := b.app.Begin(t.Context())
	b.must(err)
	_, err = tx.Exec(t.Context(), `SELECT FROM idempotency_keys WHERE key IN ('k7', 'k8') FOR UPDATE`)
	b.must(err)
	if r := b.retain(); r.ExpiredKeys != 2498 {
		t.Errorf("%d keys were deleted, want 2498", r.ExpiredKeys)
	}
	b.must(tx.Rollback(t.Context()))
	if r := b.retain(); r.ExpiredKeys != 2 {
		t.Errorf("%d keys were deleted, want 2", r.ExpiredKeys)
	}
	b.wantText("keys", `SELECT count(*) FROM idempotency_keys`, "500")

	// A request that is being executed keeps its key, whatever its age.
	b.exec(`UPDATE idempotency_keys SET expires_at = now() - interval '1 minute', lease_until = now() + interval '1 minute' WHERE key = 'k2999'`)
	if r := b.retain(); r.ExpiredKeys != 0 {
		t.Errorf("%d keys with a running lease were deleted", r.ExpiredKeys)
	}
	b.exec(`UPDATE idempotency_keys SET lease_until = now() - interval '1 second' WHERE key = 'k2999'`)
	if r := b.retain(); r.ExpiredKeys != 1 {
		t.Errorf("%d keys were deleted, want 1", r.ExpiredKeys)
	}
}

// TestRetainNeverTakesAPendingRow: not one that a transaction makes pending, and
// not one that lies at the same place of another partition.
func TestRetainNeverTakesAPendingRow(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.delivered(10, "2 hours", "2 hours")
		tx, err := b.app.Begin(t.Context())
		b.must(err)
		_, err = tx.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = NULL WHERE id = 5`)
		b.must(err)
		if r := b.retain(); r.Tables[0].Archived != 9 {
			t.Errorf("report %+v", r)
		}
		b.must(tx.Commit(t.Context()))
		b.retain()
		b.wantText("outbox", `SELECT string_agg(id || ' ' || coalesce(processed_at::text, 'pending'), ', ') FROM outbox_messages`, "5 pending")

		b.exec(`DROP TABLE outbox_messages`)
		b.exec(`CREATE TABLE outbox_messages (LIKE outbox_messages_dlq) PARTITION BY LIST (tenant_id)`)
		b.exec(`ALTER TABLE outbox_messages DROP outbox, DROP row_id, DROP original, DROP failed_at, DROP dead_letter_id`)
		b.exec(`CREATE INDEX ON outbox_messages (processed_at)`)
		for tenant := range 3 {
			b.exec(fmt.Sprintf(`CREATE TABLE tenant%d PARTITION OF outbox_messages FOR VALUES IN (%[1]d)`, tenant))
			b.exec(fmt.Sprintf(`INSERT INTO outbox_messages (id, tenant_id, processed_at)
				SELECT i, %d, CASE WHEN i %% 3 = %[1]d THEN now() - interval '2 hours' END FROM generate_series(1, 300) i`, tenant))
		}
		if r := b.retain(); r.Tables[0].Archived != 300 {
			t.Errorf("report %+v", r)
		}
		b.wantText("outbox", `SELECT count(*) || ' ' || count(processed_at) FROM outbox_messages`, "600 0")
	})
}

// TestRetainWaitsForNobody: a transaction that has read the archive, and stays
// open, keeps months from being created and dropped, and nothing else.
func TestRetainWaitsForNobody(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.delivered(3, "100 days", "99 days")
		b.retain()
		b.delivered(3, "0 days", "3 hours")
		b.delivered(3, "31 days", "2 hours") // its month is missing
		b.delivered(4, "0 days", "100 minutes")
		reader := b.connect()
		tx, err := reader.Begin(t.Context())
		b.must(err)
		_, err = tx.Exec(t.Context(), `SELECT count(*) FROM outbox_messages_archive`)
		b.must(err)

		inserted := make(chan error, 1)
		stop := make(chan struct{})
		app := b.connect()
		go func() {
			_, err := app.Exec(context.Background(), `SET lock_timeout = 200`)
			for n := 0; err == nil; n++ {
				select {
				case <-stop:
					inserted <- nil
					return
				default:
					_, err = app.Exec(context.Background(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'x', '{}')`)
				}
			}
			inserted <- err
		}()
		start := time.Now()
		r := b.retain(dropAfter(32 * day))
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("the pass took %s", took)
		}
		close(stop)
		if err := <-inserted; err != nil {
			t.Errorf("a producer was held up: %v", err)
		}
		if len(r.Created) > 0 || len(r.Dropped) > 0 || len(r.Notes) != 2 || !strings.HasPrefix(r.Notes[0], b.month("-31 days")+" is left to the next pass") ||
			!strings.HasPrefix(r.Notes[1], "left to the next pass: drop "+b.month("-100 days")) {
			t.Errorf("report %+v", r)
		}
		if strings.Contains(b.text(`SELECT string_agg(tableoid::regclass::text, ' ') FROM outbox_messages_archive`), "default") {
			t.Error("rows whose month had to wait went to the default partition")
		}
		if r.Tables[0].Archived != 7 {
			t.Errorf("%d rows were archived, want 7", r.Tables[0].Archived)
		}
		b.must(tx.Rollback(t.Context()))
		b.retain(dropAfter(200 * day))
		b.wantText("archive", `SELECT count(*) FROM outbox_messages_archive`, "13")

		// ALTER TABLE has the outbox.
		b.delivered(3, "2 hours", "2 hours")
		tx, err = reader.Begin(t.Context())
		b.must(err)
		_, err = tx.Exec(t.Context(), `LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE`)
		b.must(err)
		if r = b.retain(); r.Tables[0].Archived != 0 || len(r.Notes) != 1 || !strings.HasPrefix(r.Notes[0], "left to the next pass: archive rows of public.outbox_messages: ") {
			t.Errorf("report %+v", r)
		}
		b.must(tx.Rollback(t.Context()))
	})
}

func TestRetainOnePassAtATime(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.delivered(5, "2 hours", "2 hours")
	b.exec(`SELECT pg_advisory_lock(hashtextextended('walpost/retention', 0))`)
	if r := b.retain(); !r.Busy || len(r.Tables)+len(r.Created) > 0 {
		t.Errorf("report %+v", r)
	}
	b.wantText("outbox", `SELECT count(*) FROM outbox_messages`, "5")
	b.exec(`SELECT pg_advisory_unlock_all()`)
	var second *retention.Report
	r := b.retain(func(o *retention.Options) {
		o.Progress = func(*retention.Report) { second = b.retain() }
	})
	if r.Busy || r.Tables[0].Archived != 5 || second == nil || !second.Busy {
		t.Errorf("the first reports %+v, the second %+v", r, second)
	}
}

// TestRetainSkips what it cannot do, says so and does the rest.
func TestRetainSkips(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	custom, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload", "processed_at": "processed_at"})
	b.must(err)
	b.exec(`CREATE TABLE bare (LIKE outbox_messages)`)
	b.exec(`CREATE TABLE wide (LIKE outbox_messages INCLUDING ALL, "re gion" TEXT)`)
	b.exec(`CREATE TABLE typed (LIKE outbox_messages INCLUDING ALL)`)
	b.exec(`ALTER TABLE typed ALTER aggregate_id DROP IDENTITY IF EXISTS, ALTER aggregate_id TYPE TEXT`)
	for _, name := range []string{"bare", "wide", "typed", "outbox_messages"} {
		b.exec(`INSERT INTO ` + name + ` (id, aggregate_type, aggregate_id, event_type, event_version, payload, tenant_id, occurred_at, available_at, processed_at, attempts)
			VALUES (1, 'a', '1', 'x', 1, '{}', 0, now(), now(), now() - interval '2 hours', 0)`)
	}
	tables := []*outbox.Table{
		{Schema: "public", Name: "a", Layout: outbox.Canonical(), Mark: outbox.MarkDelete},
		{Schema: "public", Name: "c", Layout: custom, Mark: outbox.MarkUpdate},
		{Schema: "public", Name: "bare", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		{Schema: "public", Name: "wide", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		{Schema: "public", Name: "missing", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		{Schema: "public", Name: "typed", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		b.table,
	}
	r, err := b.tryRetain(t.Context(), func(o *retention.Options) { o.Tables = tables })
	if pg.Code(err) != "42804" || !strings.Contains(hint.Of(err), "types") {
		t.Errorf("%v (%s), want an error about the types of one table", err, hint.Of(err))
	}
	for i, want := range []string{
		`mark "delete"`, `not "custom"`, `CREATE INDEX CONCURRENTLY ON "public"."bare" ("processed_at")`,
		`ADD COLUMN "re gion" text`, "does not exist", "", "",
	} {
		if got := r.Tables[i]; !strings.Contains(got.Skipped, want) || (got.Skipped == "") != (want == "") {
			t.Errorf("%+v, want %q", got, want)
		}
	}
	if r.Tables[6].Archived != 1 {
		t.Errorf("the other tables kept the last one from being archived: %+v", r)
	}

	b.delivered(1, "2 hours", "2 hours")
	if r = b.retain(func(o *retention.Options) { o.ArchiveAfter = 0 }); r.Tables[0].Skipped != "archiving is off" || r.Tables[0].Archived != 0 {
		t.Errorf("report %+v", r)
	}
	b.exec(`DROP TABLE outbox_messages_archive, idempotency_keys`)
	r = b.retain(dropAfter(day))
	if !strings.Contains(r.Tables[0].Skipped, "migrate up") || len(r.Notes) != 0 || r.HasKeys || r.Purges {
		t.Errorf("report %+v", r)
	}
	if _, err := b.tryRetain(t.Context(), dropAfter(time.Minute)); err == nil {
		t.Error("rows would be dropped before they are archived")
	}
}

// TestRetainLeavesRefusedRows: rows that cannot be archived stay, are named, and keep no other
// one from it.
func TestRetainLeavesRefusedRows(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.delivered(2000, "40 days", "2 hours")
	b.insert(5) // pending
	b.exec(`ALTER TABLE outbox_messages_archive ADD CHECK (id <> 100)`)
	b.exec(`ALTER TABLE outbox_messages_archive ALTER tenant_id TYPE smallint`)
	b.exec(`UPDATE outbox_messages SET tenant_id = 100000 WHERE id = 1500`)
	b.exec(`CREATE TABLE refers (id bigint REFERENCES outbox_messages)`)
	b.exec(`INSERT INTO refers VALUES (1501)`)
	for pass := range 2 {
		r, err := b.tryRetain(t.Context())
		if err == nil || !strings.Contains(err.Error(), "3 stay, the first has id 100") || !strings.Contains(hint.Of(err), "outbox_messages_archive_id_check") {
			t.Errorf("%v (%s), want three rows that stay", err, hint.Of(err))
		}
		if want := []int64{1997, 0}[pass]; r.Tables[0].Archived != want || r.Tables[0].Refused != 3 {
			t.Errorf("pass %d: report %+v, want %d archived", pass, r.Tables[0], want)
		}
	}
	b.wantText("outbox", `SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_messages WHERE processed_at IS NOT NULL`, "100 1500 1501")
	b.wantText("pending", `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`, "5")
	b.wantText("archive", `SELECT count(DISTINCT id) || ' of ' || count(*) FROM outbox_messages_archive`, "1997 of 1997")

	b.exec(`ALTER TABLE outbox_messages_archive DROP CONSTRAINT outbox_messages_archive_id_check, ALTER tenant_id TYPE bigint`)
	b.exec(`DROP TABLE refers`)
	if r := b.retain(); r.Tables[0].Archived != 3 || r.Tables[0].Refused != 0 {
		t.Errorf("report %+v, want the three archived", r.Tables[0])
	}

	b.delivered(300, "40 days", "2 hours")
	b.exec(`ALTER TABLE outbox_messages_archive ADD CHECK (archived_at IS NULL) NOT VALID`)
	if r, err := b.tryRetain(t.Context()); err == nil || r.Tables[0].Refused != 100 {
		t.Errorf("every row is refused: %v, report %+v", err, r.Tables[0])
	}
	b.wantText("outbox", `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`, "300")
}

// TestRetainPrivileges: those that are documented suffice, and what is lacking is
// named.
func TestRetainPrivileges(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	role := "keeper_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT SELECT ON outbox_known TO ` + role)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	pass := func() (*retention.Report, error) {
		cfg := b.config()
		cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
		return retention.Run(t.Context(), cfg, retention.Options{Tables: []*outbox.Table{b.table}, ArchiveAfter: time.Hour, DropAfter: 35 * day})
	}
	b.delivered(3, "2 hours", "2 hours")
	b.delivered(3, "100 days", "99 days")
	b.exec(`INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token, expires_at) VALUES (0, 's', 'k', '', gen_random_uuid(), now())`)

	r, err := pass()
	if err == nil || !strings.Contains(err.Error(), "outbox_messages") || !strings.Contains(err.Error(), "idempotency_keys") || !strings.Contains(hint.Of(err), "GRANT SELECT, UPDATE") {
		t.Errorf("%v (%s), report %+v", err, hint.Of(err), r)
	}
	b.exec(`GRANT SELECT, UPDATE (processed_at), DELETE ON outbox_messages TO ` + role + `; GRANT SELECT, UPDATE, DELETE ON idempotency_keys TO ` + role)
	b.exec(`GRANT SELECT, INSERT ON outbox_messages_archive TO ` + role + `; GRANT SELECT, UPDATE, DELETE ON outbox_messages_archive_default TO ` + role)
	r, err = pass()
	b.must(err)
	if r.Tables[0].Archived != 6 || r.Purged != 3 || r.ExpiredKeys != 1 || len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "does not own") {
		t.Errorf("without the ownership: %+v", r)
	}

	b.exec(`REVOKE ALL ON outbox_messages_archive, outbox_messages_archive_default FROM ` + role)
	b.exec(`ALTER TABLE outbox_messages_archive OWNER TO ` + role + `; ALTER TABLE outbox_messages_archive_default OWNER TO ` + role)
	b.exec(`GRANT CREATE ON SCHEMA public TO ` + role)
	b.exec(`CREATE TABLE long_ago PARTITION OF outbox_messages_archive FOR VALUES FROM ('2019-01-01') TO ('2020-01-01')`)
	b.exec(`ALTER TABLE long_ago OWNER TO ` + role)
	r, err = pass()
	b.must(err)
	if len(r.Created) != 3 || !slices.Equal(r.Dropped, []string{"long_ago"}) || len(r.Notes) > 0 {
		t.Errorf("as the owner: %+v", r)
	}
	b.wantText("archive", `SELECT count(*) || ' ' || (SELECT count(*) FROM outbox_messages_archive_default) FROM outbox_messages_archive`, "3 0")
}

// TestRetainLeavesAnArchiveThatNothingComesTo: a role without privileges on it is not told to get some.
func TestRetainLeavesAnArchiveThatNothingComesTo(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkDelete)
	role := "idle_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT SELECT ON outbox_known, outbox_messages_archive TO ` + role + `; DROP TABLE idempotency_keys`)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	cfg := b.config()
	cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
	opts := retention.Options{Tables: []*outbox.Table{b.table}, ArchiveAfter: time.Hour, DropAfter: 35 * day}
	r, err := retention.Run(t.Context(), cfg, opts)
	if err != nil || len(r.Complaints()) > 0 {
		t.Errorf("%v, %+v", err, r)
	}
	// One with rows is emptied, whatever comes to it.
	b.exec(`INSERT INTO outbox_messages_archive (outbox, id, aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		VALUES ('public.outbox_messages', 1, 'order', 1, 'placed', '{}', now(), now())`)
	if _, err := retention.Run(t.Context(), cfg, opts); err == nil {
		t.Error("it does not say that it may not delete old rows of the archive")
	}
}

// TestRetainRefusesAStandby, which would fail in the middle.
func TestRetainRefusesAStandby(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`)
	if _, err := b.tryRetain(t.Context()); err == nil || !strings.Contains(hint.Of(err), "primary") {
		t.Errorf("%v (%s)", err, hint.Of(err))
	}
}
