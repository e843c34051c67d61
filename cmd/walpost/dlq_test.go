package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestDLQScripts is [TestMigrateScripts] on every version of PostgreSQL.
func TestDLQScripts(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		testscript.Run(t, testscript.Params{
			Dir:                 "testdata/dlq",
			RequireExplicitExec: true,
			Setup:               func(env *testscript.Env) error { return newDB(env, pg) },
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"exits": exits,
				"sql": func(ts *testscript.TestScript, _ bool, args []string) {
					_, err := ts.Stdout().Write([]byte(querySQL(ts, args[0])))
					ts.Check(err)
				},
				"sqlfile": func(ts *testscript.TestScript, _ bool, args []string) { querySQL(ts, ts.ReadFile(args[0])) },
			},
		})
	})
}

// office is a database, a stream that does not take the subjects late.>, and a configuration.
type office struct {
	t      *testing.T
	conn   *pgx.Conn
	js     jetstream.JetStream
	stream jetstream.StreamConfig
	config string
}

func newOffice(t *testing.T, pg *testenv.Postgres, n *testenv.NATS, outboxes string) *office {
	t.Helper()
	url := pg.NewDB(t)
	o := &office{t: t, config: filepath.Join(t.TempDir(), "walpost.yaml")}
	var err error
	o.conn, err = pgx.Connect(t.Context(), url)
	o.must(err)
	t.Cleanup(func() { _ = o.conn.Close(context.Background()) })
	slot := fmt.Sprintf("office%d", serial.Add(1))
	nc := testenv.ConnectNATS(t, n.URL())
	o.js = testenv.JetStream(t, nc)
	o.stream = jetstream.StreamConfig{Name: slot, Subjects: []string{slot + ".soon.>"}}
	_, err = o.js.CreateStream(t.Context(), o.stream)
	o.must(err)
	o.must(os.WriteFile(o.config, fmt.Appendf(nil, `
postgres: {url: %q, slot: %s}
nats: {url: %q, stream: %[2]s, subject: "%[2]s.{event_type}"}
http: {listen: ""}
outboxes:
  - %[4]s
`, url, slot, n.URL(), outboxes), 0o600))
	return o
}

func (o *office) must(err error) {
	o.t.Helper()
	if err != nil {
		o.t.Fatal(err)
	}
}

func (o *office) exec(sql string) {
	o.t.Helper()
	_, err := o.conn.Exec(o.t.Context(), sql)
	o.must(err)
}

func (o *office) text(sql string) (s string) {
	o.t.Helper()
	o.must(o.conn.QueryRow(o.t.Context(), "SELECT ("+sql+")::text").Scan(&s))
	return s
}

func (o *office) eventually(what string, holds func() bool) {
	o.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			o.t.Fatalf("waited in vain: %s", what)
		}
	}
}

// walpost runs a command that is to succeed.
func (o *office) walpost(args ...string) string {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	if code := execute(o.t.Context(), append(args, "--config", o.config), &stdout, &stderr); code != 0 {
		o.t.Fatalf("walpost %s ended with %d: %s%s", strings.Join(args, " "), code, &stdout, &stderr)
	}
	return stdout.String()
}

// relay runs until the returned function is called.
func (o *office) relay(flags ...string) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- execute(ctx, append([]string{"run", "--config", o.config}, flags...), &bytes.Buffer{}, &stderr)
	}()
	return func() {
		cancel()
		if code := <-ended; code != 0 || o.t.Failed() {
			o.t.Errorf("walpost run ended with %d: %s", code, &stderr)
		}
	}
}

func (o *office) messages() (all []*jetstream.RawStreamMsg) {
	o.t.Helper()
	s, err := o.js.Stream(o.t.Context(), o.stream.Name)
	o.must(err)
	info, err := s.Info(o.t.Context())
	o.must(err)
	for seq := uint64(1); seq <= info.State.LastSeq; seq++ {
		m, err := s.GetMsg(o.t.Context(), seq)
		o.must(err)
		all = append(all, m)
	}
	return all
}

// TestARetriedRowArrives through the relay that runs, once, as the message that it would have been at first.
func TestARetriedRowArrives(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		n := testenv.NewNATS(t, testenv.NATSOptions{})
		for _, c := range []struct{ name, outboxes, create, insert, after, settled string }{
			{
				"update", `{table: public.outgoing, mark: update, layout: {id: no, event_type: kind, payload: body, processed_at: sent}}`,
				`CREATE TABLE outgoing (no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind text, body jsonb, sent timestamptz)`,
				`INSERT INTO outgoing AS t (kind, body) VALUES ('%s', '{"n": 0.10}') RETURNING %s`, "SELECT",
				`SELECT count(*) FROM outgoing WHERE sent IS NOT NULL`,
			},
			{
				"delete", "{table: public.events, mark: delete, layout: debezium}",
				`CREATE TABLE events (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload json)`,
				`INSERT INTO events AS t VALUES (gen_random_uuid(), 'order', 'o/7', '%s', '{"n":  0.10, "n": 1e400}') RETURNING %s`, "SELECT",
				`SELECT 2 - count(*) FROM events`,
			},
		} {
			t.Run(c.name, func(t *testing.T) {
				o := newOffice(t, pg, n, c.outboxes)
				o.exec(c.create)
				o.walpost("migrate", "up")
				defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
				stop := o.relay()
				o.untilStreaming()

				table := o.table()
				tx, err := o.conn.Begin(t.Context())
				o.must(err)
				var hash int64
				o.must(tx.QueryRow(t.Context(), fmt.Sprintf(c.insert, "late.one", table.HashSQL("t"))).Scan(&hash))
				_, err = tx.Exec(t.Context(), c.after)
				o.must(err)
				o.must(tx.Commit(t.Context()))
				o.eventually("the row is dead", func() bool { return o.text(`SELECT count(*) FROM outbox_messages_dlq`) == "1" })
				if out := o.walpost("dlq", "list"); !strings.Contains(out, "uncovered: ") || !strings.Contains(out, "late.one") || !strings.Contains(out, "1 dead letter\n") {
					t.Errorf("the list says\n%s", out)
				}
				stop()

				o.stream.Subjects = []string{o.stream.Name + ".>"}
				_, err = o.js.UpdateStream(t.Context(), o.stream)
				o.must(err)
				defer o.relay()()
				if out := o.walpost("dlq", "retry", "--class", "uncovered"); out != "retried 1 dead letter\n" {
					t.Errorf("retry says %q", out)
				}
				o.exec(strings.Split(fmt.Sprintf(c.insert, "soon.two", "1"), "RETURNING")[0] + "; " + c.after)
				o.eventually("two messages", func() bool { return len(o.messages()) == 2 })
				o.eventually("both are settled", func() bool { return o.text(c.settled) == "2" })
				first := o.messages()[0]
				id, ok := outbox.ParseMessageID(o.source(first), first.Header.Get("Nats-Msg-Id"))
				if !ok || int64(id.Hash) != hash || first.Subject != o.stream.Name+".late.one" || !strings.Contains(string(first.Data), "0.10") {
					t.Errorf("the message is %s %v, want the hash %x", first.Subject, first.Header, uint64(hash))
				}
				if n := o.text(`SELECT count(*) FROM outbox_messages_dlq`); n != "0" {
					t.Errorf("%s dead letters", n)
				}
			})
		}
	})
}

// table is the outbox as the configuration says.
func (o *office) table() *outbox.Table {
	o.t.Helper()
	cmd := newMigrateCommand().Commands()[0]
	o.must(cmd.Flags().Set("config", o.config))
	cfg, err := loadConfig(cmd)
	o.must(err)
	tables, err := cfg.Tables()
	o.must(err)
	return tables[0]
}

func (o *office) source(m *jetstream.RawStreamMsg) string {
	id := strings.Split(m.Header.Get("Nats-Msg-Id"), "/")
	return strings.Join(id[:len(id)-3], "/")
}

// TestAKilledRetryGoesOn where it was: what it has put back is there once, and the rest is still dead.
func TestAKilledRetryGoesOn(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	o.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, original, last_error) SELECT 'public.outbox_messages', i,
		json_build_object('id', i, 'aggregate_type', 'order', 'aggregate_id', 1, 'event_type', 'x', 'payload', '{}'::json), 'size: x' FROM generate_series(1, 10000) i`)
	other, err := pgx.ConnectConfig(t.Context(), o.conn.Config())
	o.must(err)
	defer other.Close(context.Background()) //nolint:errcheck // it holds the row that the retry waits for
	_, err = other.Exec(t.Context(), `BEGIN; INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES (5678, 'order', 1, 'x', '{}')`)
	o.must(err)
	retry := exec.Command("walpost", "dlq", "retry", "--all", "--config", o.config)
	o.must(retry.Start())
	o.eventually("the retry waits", func() bool {
		return o.text(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'walpost dlq' AND datname = current_database() AND wait_event_type = 'Lock')`) == "true"
	})
	o.must(retry.Process.Kill())
	_ = retry.Wait()
	o.must(other.Close(t.Context()))
	o.eventually("its session ends", func() bool {
		return o.text(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walpost dlq' AND datname = current_database()`) == "0"
	})
	if back := o.text(`SELECT count(*) || ' ' || (SELECT count(*) FROM outbox_messages_dlq) FROM outbox_messages`); back != "5500 4500" {
		t.Errorf("%s are back and dead, want 5500 4500", back)
	}
	o.walpost("dlq", "retry", "--all")
	if got := o.text(`SELECT concat_ws(' ', count(*), count(DISTINCT id), max(id), (SELECT count(*) FROM outbox_messages_dlq)) FROM outbox_messages`); got != "10000 10000 10000 0" {
		t.Errorf("back are %s, want each of 10000 once", got)
	}
}

func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"plain é 漢 ∅":               "plain é 漢 ∅",
		"\x1b[2J\x9b\u009b\x7f\r\n": `\u001b[2J\ufffd\u009b\u007f\u000d\u000a`,
		"\u202e\U000e0041\u2028":    `\u202e\udb40\udc41\u2028`,
	} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %s, want %s", in, got, want)
		}
	}
	for _, c := range []struct {
		in   string
		n    int
		want string
	}{{"漢字漢字", 3, "漢字…"}, {"abc", 3, "abc"}, {"abc", 0, "abc"}} {
		if got := cut(c.in, c.n); got != c.want {
			t.Errorf("cut(%q, %d) = %q, want %q", c.in, c.n, got, c.want)
		}
	}
}

func TestPrettyIsNoBomb(t *testing.T) {
	deep := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	if got := pretty(&deep); got != deep {
		t.Errorf("%d bytes became %d", len(deep), len(got))
	}
	doc := "{\"a\":\"\u009b\",\"n\":1e400}"
	if got, want := pretty(&doc), "{\n      \"a\": \"\\u009b\",\n      \"n\": 1e400\n    }"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
