package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// output is written and read by two goroutines.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) lines() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Split(strings.TrimSuffix(o.text.String(), "\n"), "\n")
}

func (o *output) has(text string) bool { return strings.Contains(strings.Join(o.lines(), "\n"), text) }

// tail runs the command until the returned function is called; it is to end with 0.
func (o *office) tail(args ...string) (stdout, stderr *output, stop func()) {
	o.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stdout, stderr = new(output), new(output)
	ended := make(chan int, 1)
	go func() { ended <- execute(ctx, append([]string{"tail", "--config", o.config}, args...), stdout, stderr) }()
	o.t.Cleanup(cancel)
	o.eventually("tail has its consumer", func() bool {
		s, err := o.js.Stream(o.t.Context(), o.stream.Name)
		return err == nil && s.CachedInfo().State.Consumers > 0 && stderr.has("following")
	})
	return stdout, stderr, func() {
		o.t.Helper()
		cancel()
		if code := <-ended; code != 0 {
			o.t.Errorf("walpost tail ended with %d: %s", code, stderr.lines())
		}
	}
}

// TestTail: what the relay stores is shown as it is stored, from the WAL and from the table, in both formats.
func TestTail(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	for _, format := range []string{"binary", "cloudevents"} {
		t.Run(format, func(t *testing.T) {
			t.Setenv("WALPOST_FORMAT", format)
			o := newOffice(t, testenv.SharedPostgres(t), n, "{table: public.outbox_messages}")
			o.walpost("migrate", "up")
			defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
			defer o.relay()()
			o.untilStreaming()
			insert := func(eventType, payload, due string) {
				o.exec(fmt.Sprintf(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, trace_id)
					VALUES (7, 'order', 42, '%s', '%s', now() + '%s', 't 1')`, eventType, payload, due))
			}
			insert("soon.before", `{"n": 0}`, "0")
			o.eventually("it is stored", func() bool { return len(o.messages()) == 1 })
			out, errs, stop := o.tail("--json")
			insert("soon.placed", `{"n": 0.10, "esc": "\u001b[31mred"}`, "0")
			o.eventually("the first", func() bool { return out.has("soon.placed") })
			insert("soon.later", `"text"`, "2s")
			o.eventually("the delayed one", func() bool { return out.has("soon.later") })
			_, err := o.js.PublishMsg(t.Context(), &nats.Msg{
				Subject: o.stream.Name + ".soon.other", Header: nats.Header{"ce-type": {"soon.lost"}}, Data: []byte{0xff},
			})
			o.must(err)
			o.eventually("the other writer's", func() bool { return out.has(".soon.other") })
			stop()
			if errs := errs.lines(); len(errs) != 1 || errs[0] != fmt.Sprintf("following stream %s from sequence 2 on", o.stream.Name) {
				t.Errorf("it says %q", errs)
			}
			o.checkObjects(out.lines())

			out, _, stop = o.tail("--from", "2", "soon.*")
			o.eventually("all but the first", func() bool { return out.has(" 2  soon.placed") && out.has(" 3  soon.later") })
			if out.has("soon.before") {
				t.Errorf("--from 2 shows %q", out.lines())
			}
			stop()
			out, _, stop = o.tail("--since", "1h", "soon.l*", "soon.before")
			o.eventually("both", func() bool { return len(out.lines()) == 2 })
			stop()
			for i, want := range []string{
				"     1  soon.before   order/42    7       1     {\"n\": 0}",
				"     3  soon.later    order/42    7       3     [via poll] \"text\"",
			} {
				at, rest, _ := strings.Cut(out.lines()[i], " ")
				if _, err := time.Parse(time.RFC3339, at); err != nil || strings.TrimPrefix(rest, " ") != want {
					t.Errorf("line %q, want %q", out.lines()[i], want)
				}
			}
		})
	}
}

func (o *office) untilStreaming() {
	o.t.Helper()
	o.eventually("the relay streams", func() bool {
		// Not while the slot is copied: it is active then, and the table is still what delivers.
		return o.text(`SELECT EXISTS (SELECT FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
			WHERE r.state = 'streaming' AND NOT slot_name ~ '_new$' AND database = current_database())`) == "true"
	})
}

func (o *office) checkObjects(lines []string) {
	o.t.Helper()
	if len(lines) != 3 {
		o.t.Fatalf("%d objects: %q", len(lines), lines)
	}
	messages := o.messages()
	for i, line := range lines {
		var got map[string]any
		o.must(json.Unmarshal([]byte(line), &got))
		m := messages[i+1]
		if got["sequence"] != float64(i+2) || got["subject"] != m.Subject || got["stored"] != m.Time.UTC().Format(time.RFC3339Nano) {
			o.t.Errorf("object %s of message %+v", line, m)
		}
		if i == 2 {
			if got["via"] != nil || got["type"] != "soon.lost" || got["payload"] != nil || got["payload_base64"] != "/w==" {
				o.t.Errorf("the other writer's is %s", line)
			}
			continue
		}
		if id := fmt.Sprint(got["source"], "/", got["id"]); id != m.Header.Get(nats.MsgIdHdr) {
			o.t.Errorf("id %s, want %s", id, m.Header.Get(nats.MsgIdHdr))
		}
		for name, want := range map[string]any{
			"type": []string{"soon.placed", "soon.later"}[i], "aggregate_type": "order", "aggregate_id": "42", "tenant_id": "7", "version": "1",
			"aggregate_version": nil, "trace": "t 1", "via": []string{"wal", "poll"}[i], "commit": nil, "outbox": "public.outbox_messages",
			"row_id": fmt.Sprint(i + 2), "position": m.Header.Get("Walpost-Position"),
		} {
			if got[name] != want {
				o.t.Errorf("%s is %v, want %v", name, got[name], want)
			}
		}
		if want := []string{`"payload":{"n":0.10,"esc":"\u001b[31mred"}}`, `"payload":"text"}`}[i]; !strings.HasSuffix(line, want) {
			o.t.Errorf("object %s, want %s", line, want)
		}
	}
}

// TestTailOutlivesNATS: each row once, in order, while the server is killed under relay and tail.
func TestTailOutlivesNATS(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	o := newOffice(t, testenv.SharedPostgres(t), n, "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
	defer o.relay()()
	o.untilStreaming()
	out, errs, stop := o.tail("--json", "soon.*")
	const rows = 300
	for i := range rows {
		if i == 100 || i == 200 {
			o.must(n.Kill())
			o.eventually("it waits", func() bool { return strings.HasPrefix(errs.lines()[len(errs.lines())-1], "waiting: ") })
		}
		o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.x', '{}')`)
		if i == 130 || i == 230 {
			o.must(n.Start(t.Context()))
			o.eventually("it goes on", func() bool { return errs.lines()[len(errs.lines())-1] == "going on" })
		}
	}
	o.eventually("all rows", func() bool { return len(out.lines()) >= rows })
	stop()
	if len(out.lines()) != rows {
		t.Errorf("%d lines, want %d", len(out.lines()), rows)
	}
	for i, line := range out.lines() {
		var got struct {
			Row      string `json:"row_id"`
			Sequence uint64
		}
		if err := json.Unmarshal([]byte(line), &got); err != nil || got.Row != fmt.Sprint(i+1) || got.Sequence != uint64(i+1) {
			t.Fatalf("line %d is %s (%v)", i+1, line, err)
		}
	}
	if errs := errs.lines()[1:]; len(errs) != 4 || errs[0] != "waiting: "+nats.ErrDisconnected.Error() {
		t.Errorf("it says %q", errs)
	}
}

// TestTailFiltersOnTheServer: of a hundred events one crosses the network.
func TestTailFiltersOnTheServer(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	for _, c := range []struct {
		args []string
		want []string
	}{{[]string{"soon.a", "soon.b.*"}, []string{".soon.a", ".soon.b.>"}}, {[]string{"soon.a"}, []string{".soon.a"}}, {nil, nil}} {
		_, _, stop := o.tail(c.args...)
		s, err := o.js.Stream(t.Context(), o.stream.Name)
		o.must(err)
		for info := range s.ListConsumers(t.Context()).Info() {
			got := info.Config.FilterSubjects
			if info.Config.FilterSubject != "" {
				got = []string{info.Config.FilterSubject}
			}
			for i := range got {
				got[i] = strings.TrimPrefix(got[i], o.stream.Name)
			}
			if !slices.Equal(got, c.want) || info.Config.AckPolicy != jetstream.AckNonePolicy {
				t.Errorf("%q: the consumer is %+v", c.args, info.Config)
			}
		}
		stop()
	}
}
