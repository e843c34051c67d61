package migrations_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestNotifyTrigger: it announces, it comes once, and nothing of it stays.
func TestNotifyTrigger(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		conn := connect(t, url)
		odd := &outbox.Table{Schema: "public", Name: `Odd "one"`, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		exec(t, conn, `CREATE TABLE `+odd.SQL()+` (id bigint) PARTITION BY RANGE (id);
			CREATE TABLE odd_1 PARTITION OF `+odd.SQL()+` FOR VALUES FROM (0) TO (100)`)
		r := newRunner(t, url, append(outboxes()[:1], odd))
		if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
		if done, err := r.RemoveNotify(t.Context()); err != nil || len(done) > 0 {
			t.Errorf("remove where nothing is = %q, %v", done, err)
		}
		done, err := r.InstallNotify(t.Context())
		if err != nil || !slices.Equal(done, []string{"public.outbox_messages", `public.Odd "one"`}) {
			t.Fatalf("install = %q, %v", done, err)
		}
		if done, err := r.InstallNotify(t.Context()); err != nil || len(done) > 0 {
			t.Errorf("install again = %q, %v", done, err)
		}
		exec(t, conn, `DROP FUNCTION walpost_notify CASCADE; `+migrations.NotifySQL("public", append(outboxes()[:1], odd)))

		exec(t, conn, "LISTEN "+outbox.NotifyChannel)
		for _, insert := range []string{
			`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'a', 1, 'b.c', '{}' FROM generate_series(1, 100)`,
			`INSERT INTO ` + odd.SQL() + ` VALUES (1), (2)`,
		} {
			exec(t, conn, insert)
			n, err := conn.WaitForNotification(t.Context())
			if err != nil || n.Channel != outbox.NotifyChannel || n.Payload != "" {
				t.Errorf("%+v, %v after %s", n, err, insert)
			}
		}

		// A table that is not configured any more is not forgotten.
		done, err = newRunner(t, url, outboxes()[:1]).RemoveNotify(t.Context())
		if err != nil || !slices.Equal(done, []string{`public."Odd ""one"""`, "public.outbox_messages"}) {
			t.Errorf("remove = %q, %v", done, err)
		}
		var left int
		if err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_trigger WHERE tgname = $1) + (SELECT count(*) FROM pg_proc WHERE proname = $1)`,
			outbox.NotifyTrigger).Scan(&left); err != nil || left != 0 {
			t.Errorf("%d objects stay, %v", left, err)
		}
	})
}

// TestNotifyTriggerWaitsPolitely: behind a long transaction it holds up the other
// producers for a moment only, says in the end what is in its way, and comes when
// that is gone.
func TestNotifyTriggerWaitsPolitely(t *testing.T) {
	t.Parallel()
	url := testenv.SharedPostgres(t).NewDB(t)
	writer, producer, r := connect(t, url), connect(t, url), newRunner(t, url, outboxes()[:1])
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	const insert = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'b.c', '{}')`
	exec(t, writer, `BEGIN; `+insert)
	type result struct {
		done []string
		err  error
	}
	ended := make(chan result, 1)
	install := func() {
		done, err := r.InstallNotify(t.Context())
		ended <- result{done, err}
	}
	go install()
	var longest time.Duration
	var got result
	for waiting := true; waiting; {
		begun := time.Now()
		exec(t, producer, insert)
		longest = max(longest, time.Since(begun))
		select {
		case got = <-ended:
			waiting = false
		case <-time.After(5 * time.Millisecond):
		}
	}
	t.Logf("an insert took %s at most", longest)
	if longest < 100*time.Millisecond {
		t.Errorf("no insert took longer than %s beside a trigger that waits half a second: the test shows nothing", longest)
	}
	if got.err == nil || !strings.Contains(got.err.Error(), "create trigger on public.outbox_messages: ") || !strings.Contains(hint.Of(got.err), "pg_stat_activity") {
		t.Errorf("install = %q, %v, hint %q", got.done, got.err, hint.Of(got.err))
	}
	go install()
	for waits := false; !waits && t.Context().Err() == nil; time.Sleep(5 * time.Millisecond) {
		if err := producer.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'outbox_messages'::regclass)`).Scan(&waits); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, writer, `COMMIT`)
	if got = <-ended; got.err != nil || len(got.done) != 1 {
		t.Errorf("install = %q, %v", got.done, got.err)
	}
}
