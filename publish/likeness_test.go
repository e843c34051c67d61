package publish

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// TestLikeness: what the envelope writes for a row is the row's own, without its payload, too, and no message of another row is.
func TestLikeness(t *testing.T) {
	layout := outbox.Append()
	table := &outbox.Table{Schema: "public", Name: "outbox_events", Layout: layout, IDType: "bigint"}
	table.JSON[outbox.FirstHeader] = true
	row := func(id, aggregate, trace, headers, payload string) *outbox.Event {
		ev := &outbox.Event{Table: table}
		for f, v := range map[outbox.Field]string{
			outbox.ID: id, outbox.TenantID: "0", outbox.AggregateType: "order", outbox.AggregateID: aggregate, outbox.EventType: "order.placed",
			outbox.EventVersion: "1", outbox.OccurredAt: "2026-01-01 00:00:00+00", outbox.TraceID: trace, outbox.FirstHeader: headers, outbox.Payload: payload,
		} {
			if v != "" {
				ev.Values[f] = []byte(v)
			}
		}
		return ev
	}
	rows := []*outbox.Event{
		row("1", "7", "", "", `{"n": 1}`), row("2", "", "", "", "text"), row("3", "ü \r\n", "a trace", `{"a": 1, "b": "x: y", "c": null}`, "\xff\x00"),
		row("4", "7", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", `{"a": {"b": [1, 2]}}`, ""),
	}
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		for _, subject := range []string{"events.{event_type}", "{partition/8}.events.{event_type}"} {
			form := FormOf(table, subject, format, false)
			l, err := NewLikeness(table, form, "shop")
			if err != nil {
				t.Fatal(err)
			}
			template, _ := NewTemplate(subject)
			for i, ev := range rows {
				e, err := NewEnvelope(EnvelopeConfig{Source: "shop", Stream: "EVENTS", Format: format})
				if err != nil {
					t.Fatal(err)
				}
				to, err := template.Render(nil, ev)
				if err != nil {
					t.Fatal(err)
				}
				header, body, err := e.Build(ev, Stamp{Ref: ev.Ref(), Chained: true, ExpectedLast: 7, Via: jetstream.ViaPoll, Commit: 1})
				if err != nil {
					t.Fatal(err)
				}
				h, err := nats.DecodeHeadersMsg(header)
				if err != nil {
					t.Fatal(err)
				}
				m := jetstream.StoredMessage{Subject: string(to), ID: h.Get(nats.MsgIdHdr), Header: h, Body: body}
				for k, other := range rows {
					bare := *other
					bare.Values[outbox.Payload] = nil
					what := fmt.Sprintf("%s %s: message %d as row %d", format, subject, i+1, k+1)
					if is := l.Is(other, 0, &m); is != (i == k) {
						t.Errorf("%s: it is its own: %t", what, is)
					}
					if has := l.Has(&bare, other.Ref(), m.Sum()); has != (i == k) {
						t.Errorf("%s: it has its subject and headers: %t", what, has)
					}
				}
			}
		}
	}
	old := FormOf(table, "events.{event_type}", FormatBinary, false)
	old.Envelope = 0
	if _, err := NewLikeness(table, old, "shop"); err == nil {
		t.Error("messages of another version are taken for known")
	}
}
