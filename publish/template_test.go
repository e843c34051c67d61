package publish

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func TestNewTemplateRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "empty token",
		"events.{type}":                     "unknown placeholder {type}",
		"events.{event_type":                "not closed",
		"events.event_type}":                "} without its {",
		"events.{{event_type}}":             "unknown placeholder",
		"events..{event_type}":              "empty token",
		".{event_type}":                     "empty token",
		"events.":                           "empty token",
		"events.*":                          "wildcard",
		"events.>":                          "wildcard",
		"my events.{event_type}":            "printable ASCII",
		"events\n.{event_type}":             "printable ASCII",
		"évents.{event_type}":               "printable ASCII",
		"$JS.{event_type}":                  "reserved",
		"_INBOX.{event_type}":               "reserved",
		strings.Repeat("a", 600):            "limit",
		"{event_type}.{event_type }":        "unknown placeholder",
		"events.{EVENT_TYPE}":               "unknown placeholder",
		"events.{event_type}.{payload}":     "unknown placeholder",
		"events.{event_type}.{}":            "unknown placeholder",
		"events.{event_type}\x00":           "printable ASCII",
		"events.{partition/4}.{event_type}": "not the first token",
		"{partition/4}":                     "not the first token",
		"p{partition/4}.events":             "not the first token",
		"{partition/4}.{partition/4}.e":     "not the first token",
		"{partition/0}.events":              "want a number from 1 to 256",
		"{partition/257}.events":            "want a number from 1 to 256",
		"{partition/04}.events":             "want a number from 1 to 256",
		"{partition/}.events":               "want a number from 1 to 256",
		"events.{tenant_id}.{event_type}. ": "printable ASCII",
	} {
		_, err := NewTemplate(text)
		wantError(t, err, "subject template", want)
	}
}

func TestTemplateRender(t *testing.T) {
	tests := []struct{ template, pattern, want string }{
		{"events.{event_type}", "events.>", "events.order.placed"},
		{"{event_type}", ">", "order.placed"},
		{"orders", "orders", "orders"},
		{"e.{tenant_id}.{aggregate_type}.{aggregate_id}", "e.*.*.*", "e.3.order.1001"},
		{"e.t-{tenant_id}-x.{event_version}", "e.*.*", "e.t-3-x.1"},
		{"e.{tenant_id}.{event_type}.v{event_version}", "e.*.>", "e.3.order.placed.v1"},
		{"a{event_type}b.c", ">", "aorder.placedb.c"},
		{"{partition/256}.events.{event_type}", "*.events.>", "183.events.order.placed"},
	}
	for _, tt := range tests {
		tpl := must(NewTemplate(tt.template))(t)
		got := must(tpl.Render([]byte("kept"), testEvent()))(t)
		if string(got) != "kept"+tt.want {
			t.Errorf("%s renders %q, want %q", tt.template, got, tt.want)
		}
		if tpl.Pattern() != tt.pattern || tpl.String() != tt.template {
			t.Errorf("%s has pattern %q, want %q", tpl, tpl.Pattern(), tt.pattern)
		}
		if !jetstream.Covers([]string{tt.pattern}, tt.want) {
			t.Errorf("%q does not cover %q", tt.pattern, tt.want)
		}
	}
}

func TestTemplateRenderEncodes(t *testing.T) {
	tpl := must(NewTemplate("e.{aggregate_id}"))(t)
	for value, want := range map[string]string{
		"a.b":           "e.a%2Eb",
		"a%2Eb":         "e.a%252Eb", // or two ids would share a subject
		"*":             "e.%2A",
		">":             "e.%3E",
		" ":             "e.%20",
		"a\r\nPUB x":    "e.a%0D%0APUB%20x",
		"ü":             "e.%C3%BC",
		"\x00\xff":      "e.%00%FF",
		"A-z_09":        "e.A-z_09",
		"00-11-22":      "e.00-11-22",
		"$JS.API.PURGE": "e.%24JS%2EAPI%2EPURGE",
	} {
		if got := must(tpl.Render(nil, testEvent(outbox.AggregateID, value)))(t); string(got) != want {
			t.Errorf("%q renders %q, want %q", value, got, want)
		}
	}
}

func TestTemplateRenderRefuses(t *testing.T) {
	long := strings.Repeat("x", 5000)
	tests := []struct {
		template, why string
		field         outbox.Field
		value         string
	}{
		{"e.{event_type}", "NULL or empty", outbox.EventType, ""},
		{"e.{tenant_id}", "NULL or empty", outbox.TenantID, ""},
		{"e.{event_type}", "event_type", outbox.EventType, "order placed"},
		{"e.{event_type}", "event_type", outbox.EventType, "order.*"},
		{"e.{event_type}", "event_type", outbox.EventType, "order.>"},
		{"e.{event_type}", "event_type", outbox.EventType, "a*b"},
		{"e.{event_type}", "event_type", outbox.EventType, ".a"},
		{"e.{event_type}", "event_type", outbox.EventType, "a."},
		{"e.{event_type}", "event_type", outbox.EventType, "a..b"},
		{"e.{event_type}", "event_type", outbox.EventType, "."},
		{"e.{event_type}", "event_type", outbox.EventType, "a\tb"},
		{"e.{event_type}", "event_type", outbox.EventType, "a\r\nb"},
		{"e.{event_type}", "event_type", outbox.EventType, "a\x00"},
		{"e.{event_type}", "event_type", outbox.EventType, "a\x7f"},
		{"e.{event_type}", "event_type", outbox.EventType, "bestellt.ü"},
		{"e.{event_type}", "5000 bytes", outbox.EventType, long},
		{"e.{aggregate_id}", "5000 bytes", outbox.AggregateID, long},
		{"e.{aggregate_id}", "3002 bytes", outbox.AggregateID, strings.Repeat(".", 1000)},
		{"{event_type}", "reserved", outbox.EventType, "$SYS.REQ"},
		{"{event_type}", "reserved", outbox.EventType, "_INBOX.x"},
		{"{event_type}", "reserved", outbox.EventType, "_INBOX"},
	}
	for _, tt := range tests {
		tpl := must(NewTemplate(tt.template))(t)
		got, err := tpl.Render([]byte("kept"), testEvent(tt.field, tt.value))
		var row *outbox.RowError
		if !errors.As(err, &row) || row.Class != outbox.RowSubject || !strings.Contains(row.Reason, tt.why) {
			t.Errorf("%s with %.20q: %v, want a subject error about %q", tt.template, tt.value, err, tt.why)
		} else if !plainJSON(strings.ReplaceAll(strings.ReplaceAll(row.Reason, `"`, ""), `\`, "")) || len(row.Reason) > 500 {
			t.Errorf("reason %q is not a short line of printable ASCII", row.Reason)
		}
		if string(got) != "kept" {
			t.Errorf("%s with %.20q: dst became %q", tt.template, tt.value, got)
		}
	}
	for _, fine := range []string{"_INBOXES.x", "x.$y", "x._INBOX"} {
		must(must(NewTemplate("{event_type}"))(t).Render(nil, testEvent(outbox.EventType, fine)))(t)
	}
}

func TestTemplateCheckLayout(t *testing.T) {
	debezium := &outbox.Table{Schema: "public", Name: "outbox", Layout: outbox.Debezium()}
	if err := must(NewTemplate("e.{event_type}.{aggregate_id}"))(t).CheckLayout(debezium); err != nil {
		t.Error(err)
	}
	wantError(t, must(NewTemplate("e.{tenant_id}"))(t).CheckLayout(debezium), "public.outbox", "{tenant_id}")
}

func TestTemplateRenderDoesNotAllocate(t *testing.T) {
	tpl := must(NewTemplate("e.{tenant_id}.{event_type}.{aggregate_id}"))(t)
	ev, buf := testEvent(outbox.AggregateID, "a.b"), make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() { _, _ = tpl.Render(buf, ev) }); n != 0 {
		t.Errorf("Render allocates %v times", n)
	}
}

// TestServerStoresRenderedSubjects shows that what Render lets through arrives
// under exactly that subject, and does not close the connection.
func TestServerStoresRenderedSubjects(t *testing.T) {
	nc, stream := newStream(t, testenv.NATSOptions{}, func(c *natsjs.StreamConfig) { c.Subjects = []string{"e.>"} })
	types := []string{"a", "order.placed", `!"#$%&'()+,-/:;<=?@[\]^_{|}~`, strings.Repeat("t.", 300) + "t"}
	ids := []string{"*", ">", "a.b", "x\r\ny", "\x00", "ü€😀", strings.Repeat("z", 300)}
	tpl := must(NewTemplate("e.{event_type}.{aggregate_id}"))(t)
	js := testenv.JetStream(t, nc)
	for _, typ := range types {
		for _, id := range ids {
			subject := string(must(tpl.Render(nil, testEvent(outbox.EventType, typ, outbox.AggregateID, id)))(t))
			ack := must(js.Publish(t.Context(), subject, nil))(t)
			if got := must(stream.GetMsg(t.Context(), ack.Sequence))(t).Subject; got != subject {
				t.Errorf("published on %q, stored on %q", subject, got)
			}
		}
	}
}

func FuzzTemplateRender(f *testing.F) {
	for _, s := range []string{"order.placed", "", ".", "a..b", "*", "a >", "$JS.API", "_INBOX.a", "ü", "a\r\nb", "a\x00", strings.Repeat("a.", 700)} {
		f.Add(s, s)
	}
	var templates []*Template
	for _, s := range []string{"{event_type}", "events.{event_type}", "a.{aggregate_id}.{event_type}.b", "{aggregate_id}", "x{aggregate_id}y.{event_type}z"} {
		tpl, err := NewTemplate(s)
		if err != nil {
			f.Fatal(err)
		}
		templates = append(templates, tpl)
	}
	f.Fuzz(func(t *testing.T, eventType, id string) {
		ev := testEvent(outbox.EventType, eventType, outbox.AggregateID, id)
		for _, tpl := range templates {
			b, err := tpl.Render(nil, ev)
			var row *outbox.RowError
			if err != nil {
				if !errors.As(err, &row) || len(b) != 0 {
					t.Fatalf("%s: %q, %v", tpl, b, err)
				}
				continue
			}
			s := string(b)
			switch {
			case !server.IsValidLiteralSubject(s), !server.IsValidPublishSubject(s):
				t.Errorf("%s renders %q, which the server does not take", tpl, s)
			case len(s) > maxSubject, strings.HasPrefix(s, "$"), s == "_INBOX", strings.HasPrefix(s, "_INBOX."):
				t.Errorf("%s renders %q", tpl, s)
			case !jetstream.Covers([]string{tpl.Pattern()}, s):
				t.Errorf("%s: pattern %q does not cover %q", tpl, tpl.Pattern(), s)
			}
			for i := range len(s) {
				if s[i] <= ' ' || s[i] >= 0x7F || s[i] == '*' || s[i] == '>' {
					t.Errorf("%s renders %q", tpl, s)
				}
			}
		}
	})
}

func BenchmarkSubjects(b *testing.B) {
	s := NewSubjects(must(NewTemplate("events.{event_type}"))(b))
	s.Cover([]string{"events.>"})
	ev := testEvent()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Of(ev); err != nil {
			b.Fatal(err)
		}
	}
}
