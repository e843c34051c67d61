package publish

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func testStamp(ev *outbox.Event) Stamp {
	return Stamp{
		Ref:      ev.Ref(),
		Position: outbox.Position{SystemID: "7300", Timeline: 1, Commit: ev.Commit, N: ev.N, Passed: 0x20},
		Chained:  true, ExpectedLast: 0,
	}
}

func newEnvelope(tb testing.TB, format Format) *Envelope {
	tb.Helper()
	return must(NewEnvelope(EnvelopeConfig{Source: "7300/shop", Stream: "EVENTS", Format: format}))(tb)
}

func build(tb testing.TB, e *Envelope, ev *outbox.Event, st Stamp) *nats.Msg {
	tb.Helper()
	return must(message(e, ev, st))(tb)
}

// message reads a built message as the client does.
func message(e *Envelope, ev *outbox.Event, st Stamp) (*nats.Msg, error) {
	block, body, err := e.Build(ev, st)
	if block == nil {
		return nil, err
	}
	h, herr := nats.DecodeHeadersMsg(block)
	return &nats.Msg{Subject: "events.x", Header: h, Data: body}, errors.Join(err, herr)
}

func refuses(e *Envelope, ev *outbox.Event, st Stamp) error {
	_, _, err := e.Build(ev, st)
	return err
}

// flat copies a message's headers, which the next Build overwrites.
func flat(h nats.Header) map[string]string {
	out := map[string]string{}
	for k, v := range h {
		out[k] = strings.Join(v, "|")
	}
	return out
}

func wantHeaders(tb testing.TB, got nats.Header, want map[string]string) {
	tb.Helper()
	if g := flat(got); !maps.Equal(g, want) {
		for _, k := range slices.Sorted(maps.Keys(g)) {
			tb.Logf("  %s: %s", k, g[k])
		}
		tb.Errorf("headers (above), want %q", want)
	}
}

func TestEnvelopeBinary(t *testing.T) {
	ev := testEvent()
	e := newEnvelope(t, "")
	hash := fmt.Sprintf("%016x", ev.Hash())
	full := map[string]string{
		"Nats-Msg-Id":                 "7300/shop/public.outbox_messages/42/" + hash,
		"Walpost-Position":            "7300/1/1/10/1/0/20",
		"Nats-Expected-Last-Sequence": "0",
		"Nats-Expected-Stream":        "EVENTS",
		"ce-specversion":              "1.0",
		"ce-id":                       "public.outbox_messages/42/" + hash,
		"ce-source":                   "7300/shop",
		"ce-type":                     "order.placed",
		"ce-subject":                  "order/1001",
		"ce-time":                     "2026-11-20T09:00:00.25Z",
		"ce-tenantid":                 "3",
		"ce-aggregatetype":            "order",
		"ce-aggregateid":              "1001",
		"ce-aggregateversion":         "9",
		"ce-eventversion":             "1",
		"content-type":                "application/json",
		"traceparent":                 "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	}
	msg := build(t, e, ev, testStamp(ev))
	wantHeaders(t, msg.Header, full)
	if string(msg.Data) != `{"b":1.50, "a":[1,2]}` || &msg.Data[0] != &ev.Values[outbox.Payload][0] {
		t.Errorf("body %q, want the payload's own bytes", msg.Data)
	}

	// The barest row through the same envelope: nothing of the one before stays.
	bare := testEvent(outbox.TenantID, "", outbox.AggregateType, "", outbox.AggregateVersion, "", outbox.EventVersion, "",
		outbox.Payload, "", outbox.OccurredAt, "", outbox.TraceID, "")
	st := testStamp(bare)
	st.Chained, st.Via = false, "poll"
	msg = build(t, e, bare, st)
	wantHeaders(t, msg.Header, map[string]string{
		"Nats-Msg-Id":          st.Ref.MessageID("7300/shop"),
		"Walpost-Position":     st.Position.String(),
		"Walpost-Via":          "poll",
		"Nats-Expected-Stream": "EVENTS",
		"ce-specversion":       "1.0",
		"ce-id":                st.Ref.String(),
		"ce-source":            "7300/shop",
		"ce-type":              "order.placed",
		"ce-aggregateid":       "1001",
	})
	if msg.Data != nil {
		t.Errorf("body %q of a NULL payload", msg.Data)
	}
	wantHeaders(t, build(t, e, ev, testStamp(ev)).Header, full)
}

func TestEnvelopeTime(t *testing.T) {
	e := newEnvelope(t, FormatBinary)
	for occurred, want := range map[string]string{
		"2026-11-20 10:00:00+00":        "2026-11-20T10:00:00Z",
		"2026-11-20 10:00:00.123456+00": "2026-11-20T10:00:00.123456Z",
		"2028-02-29 10:00:00+00":        "2028-02-29T10:00:00Z",
		"2026-02-29 10:00:00+00":        "",
		"2026-04-31 10:00:00+00":        "",
		"2026-12-31 23:59:59.9+00":      "2026-12-31T23:59:59.9Z",
		"2026-11-20 10:00:00.10+00":     "2026-11-20T10:00:00.1Z",
		"2026-11-20 10:00:00.+00":       "",
		"2026-11-20 24:00:00+00":        "",
		"2026-11-20 10:00:00+01":        "2026-11-20T09:00:00Z",
		"2026-11-20T10:00:00+00":        "",
		"0000-11-20 10:00:00+00":        "",
		"infinity":                      "",
		"-infinity":                     "",
		"20260-11-20 10:00:00+00":       "",
		"0044-03-15 10:00:00+00 BC":     "",
		"yesterday":                     "",
	} {
		ev := testEvent(outbox.OccurredAt, occurred)
		if got := build(t, e, ev, testStamp(ev)).Header.Get("ce-time"); got != want {
			t.Errorf("ce-time of %q is %q, want %q", occurred, got, want)
		}
	}
	ev := testEvent(outbox.OccurredAt, "") // its commit's time only the WAL knows
	if got, ok := build(t, e, ev, testStamp(ev)).Header["ce-time"]; ok {
		t.Errorf("ce-time %q of a row without a time of its own", got)
	}
}

func TestEnvelopeTrace(t *testing.T) {
	const good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	e := newEnvelope(t, FormatBinary)
	for _, id := range []string{good, "01" + good[2:]} {
		ev := testEvent(outbox.TraceID, id)
		h := build(t, e, ev, testStamp(ev)).Header
		if h.Get("traceparent") != id || h["ce-traceid"] != nil {
			t.Errorf("trace id %q: %q", id, h)
		}
	}
	for _, id := range []string{
		"4bf92f3577b34da6a3ce929d0e0e4736", strings.ToUpper(good), good + "0", good[1:], "ff" + good[2:],
		"00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01", "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
		strings.Replace(good, "-", "_", 1), "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01", "a\r\nb",
	} {
		ev := testEvent(outbox.TraceID, id)
		h := build(t, e, ev, testStamp(ev)).Header
		if h["traceparent"] != nil || decodePercent(t, h.Get("ce-traceid")) != id {
			t.Errorf("trace id %q: %q", id, h)
		}
	}
}

// decodePercent is the reader's side of the CloudEvents binding for NATS.
func decodePercent(tb testing.TB, s string) string {
	tb.Helper()
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7F || s[i] == '"' {
			tb.Errorf("header value %q is not printable ASCII without spaces and quotes", s)
		}
	}
	return must(url.PathUnescape(s))(tb)
}

// TestEnvelopeHostileRows sends what a row can hold at its worst through a real
// server and decodes the stored message.
func TestEnvelopeHostileRows(t *testing.T) {
	nc, stream := newStream(t, testenv.NATSOptions{}, nil)
	e := newEnvelope(t, FormatBinary)
	fields := map[outbox.Field]string{
		outbox.TenantID: "ce-tenantid", outbox.AggregateType: "ce-aggregatetype", outbox.AggregateID: "ce-aggregateid",
		outbox.EventType: "ce-type", outbox.EventVersion: "ce-eventversion", outbox.TraceID: "ce-traceid",
	}
	for i, nasty := range []string{
		"x\r\nNats-Rollup: all", "x\nNats-TTL: 1s\r\n\r\n", "\r\n\r\n", " lead and trail ", "\x00\x01\x7f", `"quoted" \`, "100%", "%0D%0A",
		"ü€😀", "\xff\xfe", "a:b", "NATS/1.0 503\r\n", strings.Repeat("long ", 500), "\t", "\u2028", "Nats-Msg-Id",
	} {
		ev := testEvent(outbox.ID, nasty)
		for f := range fields {
			ev.Values[f] = []byte(nasty)
		}
		ev.Values[outbox.Payload] = []byte(nasty)
		st := testStamp(ev)
		st.ExpectedLast = uint64(i)
		msg := build(t, e, ev, st)
		sent := flat(msg.Header)
		msg.Subject = "events.x"
		ack, err := parseAck(must(nc.RequestMsg(msg, 5*time.Second))(t), "EVENTS")
		if err != nil {
			t.Fatalf("%q: %v", nasty, err)
		}
		got := must(stream.GetMsg(t.Context(), ack.Seq))(t)
		wantHeaders(t, got.Header, sent)
		if string(got.Data) != nasty {
			t.Errorf("body %q, want %q", got.Data, nasty)
		}
		for f, name := range fields {
			if v := decodePercent(t, got.Header.Get(name)); v != nasty {
				t.Errorf("%s of %s is %q, want %q", name, f, v, nasty)
			}
		}
		if id := decodePercent(t, got.Header.Get("ce-id")); "7300/shop/"+id != got.Header.Get(nats.MsgIdHdr) {
			t.Errorf("source/ce-id %q is not the message id %q", id, got.Header.Get(nats.MsgIdHdr))
		}
		id, ok := outbox.ParseMessageID("7300/shop", got.Header.Get(nats.MsgIdHdr))
		if !ok || id.ID != nasty || id.Hash != ev.Hash() {
			t.Errorf("message id %q reads %+v, %v", got.Header.Get(nats.MsgIdHdr), id, ok)
		}
		if pos := must(outbox.ParsePosition(got.Header.Get(jetstream.PositionHeader)))(t); pos != st.Position {
			t.Errorf("position %v, want %v", pos, st.Position)
		}
	}
	if info := must(stream.Info(t.Context()))(t); info.State.Msgs != 16 {
		t.Errorf("%d messages are stored, want 16", info.State.Msgs)
	}
}

func TestEnvelopeRefuses(t *testing.T) {
	long := strings.Repeat("x", 70_000)
	for name, tt := range map[string]struct {
		ev    *outbox.Event
		class string
	}{
		"no event type": {testEvent(outbox.EventType, ""), outbox.RowHeaders},
		"no id":         {testEvent(outbox.ID, ""), outbox.RowHeaders},
		"long id":       {testEvent(outbox.ID, long[:outbox.MaxID+1]), outbox.RowHeaders},
		"long trace":    {testEvent(outbox.TraceID, long), outbox.RowHeaders},
		"encoded long":  {testEvent(outbox.AggregateType, strings.Repeat(" ", 25_000)), outbox.RowHeaders},
		"payload":       {testEvent(outbox.Payload, strings.Repeat("x", 2<<20)), outbox.RowSize},
	} {
		for _, format := range []Format{FormatBinary, FormatCloudEvents} {
			e := newEnvelope(t, format)
			e.Limit(1<<20, 0)
			err := refuses(e, tt.ev, testStamp(tt.ev))
			if name == "encoded long" && format == FormatCloudEvents {
				continue // 25,000 spaces are small in a body
			}
			if rowClass(err) != tt.class {
				t.Errorf("%s as %s: %v, want class %s", name, format, err, tt.class)
			}
			fine := testEvent()
			build(t, e, fine, testStamp(fine))
		}
	}
}

func TestNewEnvelopeRefuses(t *testing.T) {
	for _, source := range []string{"", "my db", "a\nb", "\"", "ü", strings.Repeat("s", 257)} {
		_, err := NewEnvelope(EnvelopeConfig{Source: source, Stream: "EVENTS"})
		wantError(t, err, "source")
	}
	_, err := NewEnvelope(EnvelopeConfig{Source: "s", Stream: "EVENTS", Format: "avro"})
	wantError(t, err, "nats.format", "avro")
	for _, source := range []string{"7300/shop", "shop", "a/", "urn:x:y", "100%"} {
		must(NewEnvelope(EnvelopeConfig{Source: source, Stream: "EVENTS"}))(t)
	}
}

// TestEnvelopeSizesAreTheServers puts messages on either side of each limit: the
// envelope and the server must draw the line at the same byte.
func TestEnvelopeSizesAreTheServers(t *testing.T) {
	const maxPayload, maxMsg = 200_000, 150_000
	nc, _ := newStream(t, testenv.NATSOptions{MaxPayload: maxPayload}, func(c *natsjs.StreamConfig) { c.MaxMsgSize = maxMsg })
	send := func(ev *outbox.Event) (built, stored error) {
		e, st := newEnvelope(t, FormatBinary), testStamp(ev)
		st.Chained = false
		msg, built := message(e, ev, st) // no limit set: only the headers' own
		reply, err := nc.RequestMsg(msg, 5*time.Second)
		if err != nil {
			return built, err
		}
		_, stored = parseAck(reply, "EVENTS")
		return built, stored
	}
	grow := func(f outbox.Field, from, to int, refused func(ev *outbox.Event) bool) int {
		for from+1 < to { // the largest that passes is from
			mid := (from + to) / 2
			if refused(testEvent(f, strings.Repeat("x", mid))) {
				to = mid
			} else {
				from = mid
			}
		}
		return from
	}

	limit := func(maxPayload int64, maxMsgSize int32) func(ev *outbox.Event) bool {
		return func(ev *outbox.Event) bool {
			e := newEnvelope(t, FormatBinary)
			e.Limit(maxPayload, maxMsgSize)
			st := testStamp(ev)
			st.Chained = false
			return refuses(e, ev, st) != nil
		}
	}
	serverRefuses := func(ev *outbox.Event) bool { _, err := send(ev); return err != nil }

	size := grow(outbox.Payload, 1000, 400_000, limit(nc.MaxPayload(), maxMsg))
	if real := grow(outbox.Payload, 1000, 190_000, serverRefuses); real != size {
		t.Errorf("max_msg_size: the envelope passes %d bytes, the server %d", size, real)
	}
	size = grow(outbox.Payload, 1000, 400_000, limit(nc.MaxPayload(), 0))
	_, small := send(testEvent(outbox.Payload, strings.Repeat("x", size)))
	_, large := send(testEvent(outbox.Payload, strings.Repeat("x", size+1)))
	if ClassOf(small) != ClassRow || large != nats.ErrMaxPayload {
		t.Errorf("max_payload: at the envelope's limit %v, above it %v", small, large)
	}
	size = grow(outbox.TraceID, 1000, 65_400, limit(0, 0))
	if real := grow(outbox.TraceID, 1000, 65_400, serverRefuses); real != size {
		t.Errorf("headers: the envelope passes %d bytes, the server %d", size, real)
	}
	if built, stored := send(testEvent(outbox.TraceID, strings.Repeat("x", size+1))); rowClass(built) != outbox.RowHeaders || ClassOf(stored) != ClassRow {
		t.Errorf("headers above the limit: %v and %v", built, stored)
	}
}

func TestEnvelopeAllocations(t *testing.T) {
	ev := testEvent()
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		e, st := newEnvelope(t, format), testStamp(ev)
		// encoding/json checks payloads with pooled scanners, some of which the race
		// detector has its pool drop: the least of many runs is what counts.
		least := math.Inf(1)
		for range 100 {
			least = min(least, testing.AllocsPerRun(1, func() { _, _, _ = e.Build(ev, st) }))
		}
		if least > 0 {
			t.Errorf("Build as %s allocates %v times", format, least)
		}
	}
}

func FuzzEnvelope(f *testing.F) {
	f.Add("order.placed", "1001", `{"a":1}`)
	f.Add("\r\n", " ", `1,"id":"x"`)
	f.Add("ü", "\x00", "\xff")
	binary, wrapped := newEnvelope(f, FormatBinary), newEnvelope(f, FormatCloudEvents)
	f.Fuzz(func(t *testing.T, eventType, id, payload string) {
		ev := testEvent(outbox.EventType, eventType, outbox.AggregateID, id, outbox.ID, id, outbox.TraceID, id, outbox.Payload, payload)
		if msg, err := message(binary, ev, testStamp(ev)); err == nil {
			for k, v := range msg.Header {
				if len(v) != 1 || v[0] == "" {
					t.Errorf("header %s: %q", k, v)
				}
				if strings.HasPrefix(k, "ce-") {
					decodePercent(t, v[0])
				}
				if strings.ContainsFunc(v[0], func(r rune) bool { return r <= ' ' || r >= 0x7F }) {
					t.Errorf("header %s: %q", k, v)
				}
			}
			if !bytes.Equal(msg.Data, ev.Values[outbox.Payload]) {
				t.Errorf("body %q of payload %q", msg.Data, payload)
			}
			checkEncodedSize(t, binary, msg)
		}
		if msg, err := message(wrapped, ev, testStamp(ev)); err == nil {
			checkCloudEvent(t, msg.Data, ev)
			checkEncodedSize(t, wrapped, msg)
		}
	})
}

// checkEncodedSize compares with nats.go's count.
func checkEncodedSize(t *testing.T, e *Envelope, msg *nats.Msg) {
	t.Helper()
	bare := nats.Msg{Header: msg.Header}
	if want := bare.Size(); len(e.headers.block) != want {
		t.Errorf("the header block has %d bytes, nats.go's %d", len(e.headers.block), want)
	}
}

func BenchmarkEnvelope(b *testing.B) {
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		b.Run(string(format), func(b *testing.B) {
			e, ev := newEnvelope(b, format), testEvent()
			ev.Values[outbox.Payload] = []byte(`{"items":["` + strings.Repeat("x", 280) + `"]}`)
			st := testStamp(ev)
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := e.Build(ev, st); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
