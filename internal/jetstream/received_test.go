package jetstream_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// TestReceivedIsWhatWasSent, in both formats, whatever the row holds.
func TestReceivedIsWhatWasSent(t *testing.T) {
	meta := &nats.MsgMetadata{Timestamp: time.Unix(1, 0)}
	meta.Sequence.Stream = 17
	for _, format := range []publish.Format{publish.FormatBinary, publish.FormatCloudEvents} {
		for _, ev := range []*outbox.Event{
			testEvent(),
			testEvent(outbox.AggregateType, "100 %\r\nce-id: x", outbox.TenantID, `"ü"`, outbox.ID, "a/b c", outbox.TraceID, "t 1"),
			testEvent(outbox.TenantID, "", outbox.AggregateType, "", outbox.TraceID, "", outbox.Payload, "plain %41"),
			testEvent(outbox.Payload, "", outbox.AggregateVersion, "", outbox.EventVersion, ""),
			testEvent(outbox.Payload, "\xff\x00"),
		} {
			e := envelope(t, format)
			st := publish.Stamp{
				Ref: ev.Ref(), Position: outbox.Position{SystemID: "7300", Timeline: 1, Commit: ev.Commit, N: ev.N, Passed: 0x20}, Chained: true,
			}
			msg := build(t, e, ev, st)
			m := jetstream.ReceivedFrom(msg, meta)
			want := jetstream.Received{
				Seq: 17, At: meta.Timestamp, Subject: "events.x", Relayed: true,
				Row: outbox.MessageID{Table: "public.outbox_messages", ID: string(ev.Values[outbox.ID]), Hash: st.Ref.Hash},
				ID:  st.Ref.String(), Source: "7300/shop", Type: string(ev.Values[outbox.EventType]), Time: "2026-11-20T09:00:00.25Z",
				TenantID: string(ev.Values[outbox.TenantID]), AggregateType: string(ev.Values[outbox.AggregateType]),
				AggregateID: string(ev.Values[outbox.AggregateID]), AggregateVersion: string(ev.Values[outbox.AggregateVersion]),
				EventVersion: string(ev.Values[outbox.EventVersion]), Trace: string(ev.Values[outbox.TraceID]),
				Position: st.Position.String(), Header: msg.Header,
			}
			if payload := ev.Values[outbox.Payload]; string(m.Payload) != string(payload) {
				t.Errorf("%s: payload %q, want %q", format, m.Payload, payload)
			}
			if m.Payload = nil; !reflect.DeepEqual(m, want) {
				t.Errorf("%s:\n%+v, want\n%+v", format, m, want)
			}
			st.Via = jetstream.ViaPoll
			if m := jetstream.ReceivedFrom(build(t, e, ev, st), meta); !m.Polled || m.Commit != "" {
				t.Errorf("%s: a row from the table is %+v", format, m)
			}
			st.Commit, st.N = 0x30, 2
			if m := jetstream.ReceivedFrom(build(t, e, ev, st), meta); m.Polled || m.Commit != "0/30/2" {
				t.Errorf("%s: a row of the WAL that had to wait is %+v", format, m)
			}
		}
	}
}

// TestReceivedOfOthers: what no relay wrote is shown as it is.
func TestReceivedOfOthers(t *testing.T) {
	for name, h := range map[string]nats.Header{
		"without headers":      nil,
		"a broken envelope":    {"content-type": {"application/cloudevents+json"}},
		"a forged position":    {jetstream.PositionHeader: {"7300/1/10/0/0"}},
		"a forged id":          {jetstream.PositionHeader: {"7300/1/10/0/0"}, nats.MsgIdHdr: {"7300/shop/a"}, "ce-source": {"7300/shop"}},
		"broken percent signs": {"ce-type": {"%"}, "ce-id": {"%4"}, "ce-source": {"%zz"}},
	} {
		m := jetstream.ReceivedFrom(&nats.Msg{Subject: "events.x", Header: h, Data: []byte("{")}, &nats.MsgMetadata{})
		if m.Relayed || string(m.Payload) != "{" || m.Row.ID != "" {
			t.Errorf("%s: %+v", name, m)
		}
	}
}

// testEvent has every field; the pairs replace values, "" making one NULL.
func testEvent(pairs ...any) *outbox.Event {
	ev := &outbox.Event{
		Table:  &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		Commit: 0x1_0000_0010, N: 1,
	}
	for f, v := range map[outbox.Field]string{
		outbox.ID: "42", outbox.TenantID: "3", outbox.AggregateType: "order", outbox.AggregateID: "1001",
		outbox.AggregateVersion: "9", outbox.EventType: "order.placed", outbox.EventVersion: "1",
		outbox.Payload: `{"b":1.50, "a":[1,2]}`, outbox.OccurredAt: "2026-11-20 11:00:00.25+02",
		outbox.TraceID: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	} {
		ev.Values[f] = []byte(v)
	}
	for i := 0; i < len(pairs); i += 2 {
		ev.Values[pairs[i].(outbox.Field)] = []byte(pairs[i+1].(string))
		if pairs[i+1] == "" {
			ev.Values[pairs[i].(outbox.Field)] = nil
		}
	}
	return ev
}

func envelope(tb testing.TB, format publish.Format) *publish.Envelope {
	tb.Helper()
	return jetstream.Must(publish.NewEnvelope(publish.EnvelopeConfig{Source: "7300/shop", Stream: "EVENTS", Format: format}))(tb)
}

func build(tb testing.TB, e *publish.Envelope, ev *outbox.Event, st publish.Stamp) *nats.Msg {
	tb.Helper()
	block, body, err := e.Build(ev, st)
	if err != nil {
		tb.Fatal(err)
	}
	return &nats.Msg{Subject: "events.x", Header: jetstream.Must(nats.DecodeHeadersMsg(block))(tb), Data: body}
}
