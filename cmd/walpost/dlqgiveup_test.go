package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestGiveUp: a parked row that an operator gives up becomes a dead letter under the running relay, and the later rows of
// its aggregate follow in order, also those that come meanwhile. No other row is touched.
func TestGiveUp(t *testing.T) {
	const insert = `INSERT INTO %s (aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES ('order', %d, '%s', '{"n": %d}', coalesce(%s, now())) RETURNING id`
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		n := testenv.NewNATS(t, testenv.NATSOptions{})
		for _, c := range []struct{ outboxes, table, mode, create, insert string }{
			{"{table: public.outbox_messages}", "outbox_messages", "stream", "SELECT", insert},
			{"{table: public.outbox_messages, mark: delete}", "outbox_messages", "poll", "SELECT", insert},
			{"{layout: append}", "outbox_events", "stream", "SELECT", insert},
			{"{layout: append}", "outbox_events", "poll", "SELECT", insert},
			{
				"{table: public.ferry, layout: eventferry}", "ferry", "stream",
				`CREATE TABLE ferry (id bigserial PRIMARY KEY, aggregate_type text, aggregate_id text, topic text, payload jsonb, created_at timestamptz DEFAULT now(),
					trace_id text, next_retry_at timestamptz, processed_at timestamptz, attempts int DEFAULT 0, status smallint DEFAULT 0, message_id text, partition_key text, headers jsonb)`,
				`INSERT INTO %s (aggregate_type, aggregate_id, topic, payload, next_retry_at) VALUES ('order', %d, '%s', '{"n": %d}', %s) RETURNING id`,
			},
			{
				"{table: public.pris, layout: prisma}", "pris", "stream",
				`CREATE TABLE pris (id bigserial PRIMARY KEY, "aggregateType" text, "aggregateId" text, "eventType" text, payload jsonb, "createdAt" timestamp DEFAULT now(),
					"publishedAt" timestamp, attempts int DEFAULT 0, "lastError" text)`,
				`INSERT INTO %s ("aggregateType", "aggregateId", "eventType", payload, "createdAt") VALUES ('order', %d, '%s', '{"n": %d}', coalesce(%s, now())) RETURNING id`,
			},
		} {
			t.Run(c.table+"/"+c.mode, func(t *testing.T) {
				o := newOffice(t, pg, n, c.outboxes)
				f, err := os.OpenFile(o.config, os.O_APPEND|os.O_WRONLY, 0)
				o.must(err)
				_, err = f.WriteString("fallback: {interval: 100ms, backoff: 1h}\nmode: " + c.mode + "\n")
				o.must(err)
				o.must(f.Close())
				o.exec(c.create)
				o.walpost("migrate", "up")
				defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
				defer o.relay()()
				put := func(aggregate int, event string, n int, due string) (id string) {
					o.must(o.conn.QueryRow(t.Context(), fmt.Sprintf(c.insert+"::text", c.table, aggregate, event, n, due)).Scan(&id))
					return id
				}
				delivered := put(2, "soon.one", 1, "NULL")
				o.eventually("a row is delivered", func() bool { return len(o.messages()) == 1 })
				bad := put(1, "late.one", 2, "NULL")
				o.eventually("the row is parked", func() bool { return strings.Contains(o.walpost("dlq", "list", "--parked", "--json"), `"attempts":1`) })
				held := put(1, "soon.one", 3, "NULL")
				o.eventually("a later row is held", func() bool {
					return strings.Contains(o.walpost("dlq", "list", "--parked", "--json"), `"rows":2`)
				})

				for _, x := range []struct{ id, says string }{
					{held, "it is held behind a parked row of its aggregate"}, {"4711", "there is no such row"}, {"x", "invalid input syntax"},
				} {
					o.leaves(x.id, x.says)
				}
				if c.table != "pris" { // whose rows are due at once
					o.leaves(put(3, "soon.one", 1, "now() + interval '1 hour'"), "it has not failed")
				}
				if c.table != "outbox_messages" || c.mode != "poll" { // with mark delete it is gone
					o.eventually("it is marked", func() bool {
						return strings.Contains(o.giveUp(1, delivered), "it is delivered, or a dead letter already")
					})
				}
				if out := o.giveUp(0, bad); !strings.HasPrefix(out, "gave up row "+bad+" of public."+c.table+": the relay tries it once more within 100ms") {
					t.Errorf("give-up says %q", out)
				}
				for i := range 20 {
					put(1, "soon.one", 4+i, "NULL")
				}
				o.eventually("all others are delivered", func() bool { return len(o.messages()) == 22 })
				for i, m := range o.messages()[1:] {
					if want := fmt.Sprintf(`{"n": %d}`, 3+i); string(m.Data) != want {
						t.Errorf("message %d is %s, want %s", i+2, m.Data, want)
					}
				}
				letter := o.text(`SELECT string_agg(concat_ws(' ', row_id, attempts, split_part(last_error, ':', 1)), ', ') FROM outbox_messages_dlq`)
				if want := bad + " 11 uncovered"; letter != want {
					t.Errorf("the dead letters are %q, want %q", letter, want)
				}
				o.eventually("no row is parked or held", func() bool { return o.walpost("dlq", "list", "--parked") == "no row is parked or held\n" })
			})
		}
	})
}

// giveUp runs the command, which ends with a code, and returns what it prints.
func (o *office) giveUp(code int, id string) string {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	if got := execute(o.t.Context(), []string{"dlq", "give-up", "--yes", id, "--config", o.config}, &stdout, &stderr); got != code {
		o.t.Errorf("give-up %s ended with %d, want %d: %s%s", id, got, code, &stdout, &stderr)
	}
	return stdout.String()
}

func (o *office) leaves(id, says string) {
	o.t.Helper()
	if out := o.giveUp(1, id); !strings.HasPrefix(out, "left row "+id+" of ") || !strings.Contains(out, says) {
		o.t.Errorf("give-up %s says %q, want %q", id, out, says)
	}
}
