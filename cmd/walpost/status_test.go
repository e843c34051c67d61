package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/testenv"
)

// status is the report, which is to end with exit code 0.
func (o *office) status(flags ...string) (r status.Report) {
	o.t.Helper()
	o.must(json.Unmarshal([]byte(o.walpost(append([]string{"status", "--json"}, flags...)...)), &r))
	return r
}

// unreadParts are the parts that could not be read, each with its hint.
func unreadParts(r *status.Report) map[string]string {
	parts := map[string]string{}
	for _, u := range r.Unread {
		parts[u.Part] = u.Hint
	}
	return parts
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// number tells an unknown number from 0.
func number(n *int) string {
	if n == nil {
		return "null"
	}
	return fmt.Sprint(*n)
}

// TestStatusOfAJournal: it says how far the progress is.
func TestStatusOfAJournal(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{layout: append}")
	o.walpost("migrate", "up")
	o.exec(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', n, 'order.placed', '{}' FROM generate_series(1, 5) n`)
	if p := o.status().Outboxes[0].Progress; p == nil || p.SettledTo != 0 || p.Behind != 5 || p.Holes != 0 {
		t.Errorf("before the first start: %+v", p)
	}
	o.exec(testenv.SettledTo("public.outbox_events", 4, "[2,3),[3,4)"))
	if p := o.status().Outboxes[0].Progress; p == nil || p.SettledTo != 4 || p.Behind != 1 || p.Holes != 1 {
		t.Errorf("with a progress: %+v", p)
	}
	journal := func() string {
		return regexp.MustCompile(`(?m)^  journal +(.*)$`).FindStringSubmatch(o.walpost("status"))[1]
	}
	equal(t, "the line", journal(), "settled up to id 4 of 5 (follows the deliveries at the next searches, every 30s), holes: 1")

	o.exec(`DELETE FROM outbox_known`)
	defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
	defer o.relay("--fallback-interval", "100ms", "--subject", o.stream.Name+".soon.{event_type}")()
	o.eventually("searches settle what was delivered", func() bool { return journal() == "settled up to id 5, the newest, holes: 0" })
}

// TestStatus follows a relay from before its first start.
func TestStatus(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
		r := o.status()
		equal(t, "mode", r.Relay.Mode, "none")
		equal(t, "slot", r.Slot.Exists, false)
		equal(t, "stream", r.Stream.Exists, true)
		for _, part := range []string{"outboxes.pending", "dead_letters"} {
			if h := unreadParts(&r)[part]; !strings.Contains(h, "walpost migrate up") {
				t.Errorf("without tables the hint for %s is %q", part, h)
			}
		}

		o.walpost("migrate", "up")
		stop := o.relay()
		o.eventually("the relay streams", func() bool { return o.status().Relay.Mode == "stream" })
		o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at) VALUES
			('order', 1, 'soon.one', '{}', now()), ('order', 2, 'late.two', '{}', now()), ('order', 3, 'soon.three', '{}', now() + interval '1 hour')`)
		o.eventually("a row is parked", func() bool { return number(o.status().Outboxes[0].Parked) == "1" })
		o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 2, 'soon.four', '{}')`)
		o.eventually("a row is held", func() bool { return number(o.status().Outboxes[0].Held) == "1" })
		o.eventually("a row is marked", func() bool { return number(o.status().Outboxes[0].Pending) == "3" })
		r = o.status()
		equal(t, "unread", len(r.Unread), 0)
		equal(t, "dead letters", number(r.DeadLetters), "0")
		equal(t, "parked", number(r.Outboxes[0].Parked), "1")
		if age := r.Outboxes[0].OldestDueAge; age == nil || *age <= 0 || *age > 60 {
			t.Errorf("the oldest due row is due for %v s, want that of the held row", age)
		}
		equal(t, "messages", r.Stream.Messages, 1)
		equal(t, "last sequence", r.Stream.LastSeq, 1)
		equal(t, "standing by", number(r.Relay.StandingBy), "0")
		equal(t, "a shared slot", r.Relay.SlotShared, false)
		t.Setenv("WALPOST_STREAM", "OTHER")
		equal(t, "a shared slot, of another stream", o.status().Relay.SlotShared, true)
		wantText(t, o.walpost("status"), "^note: the relay that holds the lock has other outboxes or another stream")
		o.must(os.Unsetenv("WALPOST_STREAM"))
		equal(t, "who holds the lock", r.Relay.Lock.Application, "walpost")
		equal(t, "its process", fmt.Sprint(r.Relay.Lock.PID), o.text(`SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
		equal(t, "the slot's process", fmt.Sprint(r.Slot.Walsender.PID), o.text(`SELECT active_pid FROM pg_replication_slots WHERE database = current_database()`))
		equal(t, "client", *r.Relay.Lock.Client, "127.0.0.1")
		equal(t, "plugin", r.Slot.Plugin, "pgoutput")
		equal(t, "failover", r.Slot.Failover, pg.Version() >= 17)
		equal(t, "safe bytes", r.Slot.Safe, -1)
		if r.Slot.Retained <= 0 || r.Slot.Confirmed == "" || r.Relay.Lock.Since == nil || r.Stream.LastMessage == nil {
			t.Errorf("the report lacks something: %+v %+v %+v", r.Slot, r.Relay.Lock, r.Stream)
		}
		if text := o.walpost("status"); strings.Contains(text, "note:") || !regexp.MustCompile(`(?m)^relay +streams$`).MatchString(text) ||
			!regexp.MustCompile(`(?m)^  pending +3, the oldest due for \d+s$`).MatchString(text) || !regexp.MustCompile("(?m)^  failed +1 parked, 1 held: see `walpost dlq list --parked`$").MatchString(text) {
			t.Errorf("status says\n%s", text)
		}

		stopOther := o.relay()
		o.eventually("the other one stands by", func() bool { return number(o.status().Relay.StandingBy) == "1" })
		stopOther()
		t.Run("locked", func(t *testing.T) { o.lockedTable(t) })
		t.Run("privileges", func(t *testing.T) { o.grantWhatIsNamed(t, pg) })
		stop()

		o.eventually("the lock is free", func() bool { return o.status().Relay.Lock == nil }) // its session may end a moment later
		r = o.status()
		equal(t, "mode", r.Relay.Mode, "none")
		equal(t, "slot", r.Slot.Exists, true)
		equal(t, "lock", r.Relay.Lock == nil, true)
		if text := o.walpost("status"); !strings.Contains(text, "nobody holds the lock") || !regexp.MustCompile(`(?m)^  in use by +nobody$`).MatchString(text) {
			t.Errorf("status says\n%s", text)
		}
		defer o.relay("--mode", "poll")()
		o.eventually("it polls", func() bool { r := o.status(); return r.Relay.Mode == "poll" && !r.Slot.Exists })
	})
}

// lockedTable: the parts of a table that an ALTER TABLE has locked are left out, all others are there.
func (o *office) lockedTable(t *testing.T) {
	other, err := pgx.ConnectConfig(t.Context(), o.conn.Config())
	o.must(err)
	defer other.Close(t.Context()) //nolint:errcheck // it gives the lock back
	_, err = other.Exec(t.Context(), `BEGIN; ALTER TABLE outbox_messages ADD COLUMN more int`)
	o.must(err)
	r := o.status()
	if h := unreadParts(&r)["outboxes.pending"]; len(r.Unread) != 1 || !strings.Contains(h, "ALTER TABLE") || r.Outboxes[0].Pending != nil {
		t.Errorf("unread are %v", r.Unread)
	}
	equal(t, "dead letters", number(r.DeadLetters), "0")
	equal(t, "mode", r.Relay.Mode, "stream")
}

// grantWhatIsNamed: a role that may do nothing sees what everybody may, and everything when it was granted what the hints name.
func (o *office) grantWhatIsNamed(t *testing.T, pg *testenv.Postgres) {
	role := "reader_" + o.stream.Name
	o.exec("CREATE ROLE " + role + " LOGIN")
	defer o.exec("DROP OWNED BY " + role + "; DROP ROLE " + role)
	url := pg.URLFor(role, o.conn.Config().Database)
	r := o.status("--postgres-url", url)
	hints := unreadParts(&r)
	if got := slices.Sorted(maps.Keys(hints)); !slices.Equal(got, []string{"dead_letters", "outboxes.outbox", "outboxes.pending", "relay.standing_by", "replay"}) {
		t.Fatalf("unread are %v", r.Unread)
	}
	equal(t, "mode", r.Relay.Mode, "stream")
	equal(t, "who holds the lock", r.Relay.Lock.Application, "walpost")
	equal(t, "client", r.Relay.Lock.Client == nil, true)
	equal(t, "standing by", number(r.Relay.StandingBy), "null")
	for _, h := range hints {
		_, grants, found := strings.Cut(h, "owner: ")
		if !found {
			grants = h
		}
		o.exec(grants)
	}
	if r = o.status("--postgres-url", url); len(r.Unread) > 0 || r.Relay.Lock.Client == nil {
		t.Errorf("with the grants that were named unread are %v", r.Unread)
	}
}

// TestStatusOfAnUnreachableServer shows the other one.
func TestStatusOfAnUnreachableServer(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	for flag, c := range map[string]struct{ url, server, shown, hidden string }{
		"--postgres-url": {"postgres://spy:topsecret@127.0.0.1:1/x", "postgres", "  messages ", "outbox "},
		"--nats-url":     {"nats://spy:topsecret@127.0.0.1:1", "nats", "outbox ", "  messages "},
	} {
		for _, asJSON := range []string{"--json=false", "--json"} {
			var stdout, stderr bytes.Buffer
			code := execute(t.Context(), []string{"status", "--config", o.config, flag, c.url, asJSON}, &stdout, &stderr)
			equal(t, flag+": exit code", code, exitFailed)
			if !strings.HasPrefix(stderr.String(), "error: connect to ") || !strings.Contains(stderr.String(), "\nhint: ") || strings.Contains(stderr.String()+stdout.String(), "topsecret") {
				t.Errorf("%s: %s", flag, &stderr)
			}
			if asJSON == "--json" {
				var r status.Report
				o.must(json.Unmarshal(stdout.Bytes(), &r))
				if len(r.Errors) != 1 || r.Errors[0].Server != c.server || (r.Relay == nil) != (c.server == "postgres") || (r.Stream == nil) != (c.server == "nats") {
					t.Errorf("%s: the report is %s", flag, &stdout)
				}
			} else if !strings.Contains(stdout.String(), "could not be asked") || !strings.Contains(stdout.String(), "\n"+c.shown) || strings.Contains(stdout.String(), "\n"+c.hidden) {
				t.Errorf("%s: the report is\n%s", flag, &stdout)
			}
		}
	}
}

// TestStatusOnlyReads: a standby bears no change.
func TestStatusOnlyReads(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', i, 'soon.one', '{}' FROM generate_series(1, 100001) i`)
	r := o.status()
	equal(t, "pending", number(r.Outboxes[0].Pending), fmt.Sprint(r.CountLimit))
	if text := o.walpost("status"); !strings.Contains(text, "at least 100000, the oldest due for ") {
		t.Errorf("status says\n%s", text)
	}
	standby := pg.NewStandby(t, "standby", nil)
	url := standby.URL(o.conn.Config().Database)
	o.must(standby.Exec(t.Context(), "postgres", `SELECT pg_create_physical_replication_slot('`+o.stream.Name+`', true)`))
	o.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id) VALUES ('public.outbox_messages', '1')`)
	o.eventually("the standby has it", func() bool { return number(o.status("--postgres-url", url).DeadLetters) == "1" })
	r = o.status("--postgres-url", url)
	equal(t, "standby", r.Server.Standby, true)
	equal(t, "pending", number(r.Outboxes[0].Pending), fmt.Sprint(r.CountLimit))
	equal(t, "unread", len(r.Unread), 0)
	equal(t, "mode", r.Relay.Mode, "none")
	equal(t, "its own slot", r.Slot.Type, "physical")
	wantText(t, o.walpost("status", "--postgres-url", url), "^server .*; it is a standby, ")
}

// TestStatusCountsWhoWaits: not the one that has just got the lock, and not those of another slot.
func TestStatusCountsWhoWaits(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	relays := map[string]*pgx.Conn{}
	for _, name := range []string{"active", "first", "second", "other"} {
		relays[name] = o.connect()
		_, err := relays[name].Exec(t.Context(), `SET application_name = 'walpost'`)
		o.must(err)
		slot := o.stream.Name
		if name == "other" {
			slot += "_2"
		}
		_, err = relays[name].Exec(t.Context(), `SELECT pg_try_advisory_lock(hashtextextended('walpost/`+slot+`', 0))`)
		o.must(err)
	}
	r := o.status()
	equal(t, "who holds the lock", r.Relay.Lock.PID, relays["active"].PgConn().PID())
	equal(t, "standing by", number(r.Relay.StandingBy), "2")
	equal(t, "mode", r.Relay.Mode, "poll")
}

// TestStatusBesideAnotherRole: the relay of another outbox hides what it asks, and stands by for nobody here.
func TestStatusBesideAnotherRole(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	own, other := "own_"+o.stream.Name, "other_"+o.stream.Name
	o.exec("CREATE ROLE " + own + " LOGIN; CREATE ROLE " + other + " LOGIN")
	t.Cleanup(func() { o.must(pg.Exec(context.Background(), "postgres", "DROP ROLE "+own+", "+other)) })
	lock := `SELECT pg_try_advisory_lock(hashtextextended('walpost/` + o.stream.Name + `', 0))`
	for _, relay := range []struct{ role, asks string }{{own, lock}, {own, lock}, {other, `SELECT 1`}} {
		conn, err := pgx.Connect(t.Context(), pg.URLFor(relay.role, o.conn.Config().Database))
		o.must(err)
		defer conn.Close(context.Background()) //nolint:errcheck // it has done its work
		_, err = conn.Exec(t.Context(), `SET application_name = 'walpost'`)
		o.must(err)
		_, err = conn.Exec(t.Context(), relay.asks)
		o.must(err)
	}
	r := o.status("--postgres-url", pg.URLFor(own, o.conn.Config().Database))
	equal(t, "standing by", number(r.Relay.StandingBy), "1")
	if h := unreadParts(&r)["relay.standing_by"]; h != "" {
		t.Errorf("it is unread, hint %q", h)
	}
	r = o.status("--postgres-url", pg.URLFor(other, o.conn.Config().Database))
	equal(t, "standing by, as the other sees it", number(r.Relay.StandingBy), "null")
}

// TestStatusHasPatience for two seconds with each question, and asks the others.
func TestStatusHasPatience(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.slow}")
	o.walpost("migrate", "up", "--table", "public.outbox_messages")
	o.exec(`CREATE TABLE outgoing (LIKE outbox_messages_dlq); CREATE VIEW slow AS SELECT o.xmin, o.* FROM pg_sleep(20), outgoing o`)
	began := time.Now()
	r := o.status()
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("it took %s", took)
	}
	hints := unreadParts(&r)
	if got := slices.Sorted(maps.Keys(hints)); !slices.Equal(got, []string{"outboxes.oldest_due_age_seconds", "outboxes.parked", "outboxes.pending"}) {
		t.Errorf("unread are %v", r.Unread)
	}
	wantText(t, hints["outboxes.pending"], "indexes")
	equal(t, "dead letters", number(r.DeadLetters), "0")
	equal(t, "stream", r.Stream.Exists, true)
}

// TestStatusHelpNamesTheJSON: every name, and no other.
func TestStatusHelpNamesTheJSON(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	o.walpost("slot", "create")
	defer o.walpost("slot", "drop")
	var report map[string]any
	o.must(json.Unmarshal([]byte(o.walpost("status", "--json")), &report))
	_, documented, _ := strings.Cut(help("status"), "--json prints one object.")
	names := regexp.MustCompile(`[a-z]+(_[a-z]+)*`).FindAllString(documented, -1)
	var look func(v any)
	look = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, value := range v {
				if !slices.Contains(names, name) {
					t.Errorf("the help does not tell of %q", name)
				}
				look(value)
			}
		case []any:
			for _, value := range v {
				look(value)
			}
		}
	}
	look(report)
	for _, line := range regexp.MustCompile(`(?m)^    ([a-z_]+)  `).FindAllStringSubmatch(documented, -1) {
		if _, ok := report[line[1]]; !ok {
			t.Errorf("the help tells of %q, which the report lacks", line[1])
		}
	}
}

// TestKeptWAL: what the slot keeps and the budget have the key's unit.
func TestKeptWAL(t *testing.T) {
	for _, c := range []struct {
		kept, safe, budget int64
		want               string
	}{
		{56, -1, 10e9, "56B kept of 10GB (postgres.max_retained_wal)"},
		{2_500_000_000, 1e9, 10e9, "2.5GB kept of 10GB (postgres.max_retained_wal), 1.0GB until it is lost"},
		{5 << 20, -1, 1 << 30, "5.0MiB kept of 1GiB (postgres.max_retained_wal)"},
		{5 << 20, 1 << 30, 0, "5.0MiB kept, 1.0GiB until it is lost"},
		{5 << 20, -1, 0, "5.0MiB kept, no limit"},
	} {
		if got := keptWAL(&pg.SlotState{SlotGauges: pg.SlotGauges{Retained: c.kept, Safe: c.safe}}, c.budget); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
