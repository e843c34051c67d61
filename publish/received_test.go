package publish

import (
	"reflect"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/outbox"
)

// TestReceivedIsWhatWasSent, in both formats, whatever the row holds.
func TestReceivedIsWhatWasSent(t *testing.T) {
	meta := &nats.MsgMetadata{Timestamp: time.Unix(1, 0)}
	meta.Sequence.Stream = 17
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		for _, ev := range []*outbox.Event{
			testEvent(),
			testEvent(outbox.AggregateType, "100 %\r\nce-id: x", outbox.TenantID, `"ü"`, outbox.ID, "a/b c", outbox.TraceID, "t 1"),
			testEvent(outbox.TenantID, "", outbox.AggregateType, "", outbox.TraceID, "", outbox.Payload, "plain %41"),
			testEvent(outbox.Payload, "", outbox.AggregateVersion, "", outbox.EventVersion, ""),
			testEvent(outbox.Payload, "\xff\x00"),
		} {
			e := newEnvelope(t, format)
			st := testStamp(ev)
			m := received(build(t, e, ev, st), meta)
			want := Received{
				Seq: 17, At: meta.Timestamp, Subject: "events.x", Relayed: true,
				Row: outbox.MessageID{Table: "public.outbox_messages", ID: string(ev.Values[outbox.ID]), Hash: st.Ref.Hash},
				ID:  st.Ref.String(), Source: "7300/shop", Type: string(ev.Values[outbox.EventType]), Time: "2026-11-20T09:00:00.25Z",
				TenantID: string(ev.Values[outbox.TenantID]), AggregateType: string(ev.Values[outbox.AggregateType]),
				AggregateID: string(ev.Values[outbox.AggregateID]), AggregateVersion: string(ev.Values[outbox.AggregateVersion]),
				EventVersion: string(ev.Values[outbox.EventVersion]), Trace: string(ev.Values[outbox.TraceID]),
				Position: st.Position.String(),
			}
			if payload := ev.Values[outbox.Payload]; string(m.Payload) != string(payload) {
				t.Errorf("%s: payload %q, want %q", format, m.Payload, payload)
			}
			if m.Payload = nil; !reflect.DeepEqual(m, want) {
				t.Errorf("%s:\n%+v, want\n%+v", format, m, want)
			}
			st.Via = ViaPoll
			if m := received(build(t, e, ev, st), meta); !m.Polled || m.Commit != "" {
				t.Errorf("%s: a row from the table is %+v", format, m)
			}
			st.Commit, st.N = 0x30, 2
			if m := received(build(t, e, ev, st), meta); m.Polled || m.Commit != "0/30/2" {
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
		"a forged position":    {PositionHeader: {"7300/1/10/0/0"}},
		"a forged id":          {PositionHeader: {"7300/1/10/0/0"}, nats.MsgIdHdr: {"7300/shop/a"}, "ce-source": {"7300/shop"}},
		"broken percent signs": {"ce-type": {"%"}, "ce-id": {"%4"}, "ce-source": {"%zz"}},
	} {
		m := received(&nats.Msg{Subject: "events.x", Header: h, Data: []byte("{")}, &nats.MsgMetadata{})
		if m.Relayed || string(m.Payload) != "{" || m.Row.ID != "" {
			t.Errorf("%s: %+v", name, m)
		}
	}
}
