package publish

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

var testTable = &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}

// testEvent has every field; the pairs replace values, "" making one NULL.
func testEvent(pairs ...any) *outbox.Event {
	ev := &outbox.Event{
		Table: testTable, XID: 7, Commit: 0x1_0000_0010, N: 1,
		CommitTime: time.Date(2026, 11, 20, 10, 0, 1, 500, time.FixedZone("CET", 3600)),
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

func must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		if err != nil {
			tb.Fatalf("%v (hint: %s)", err, hint.Of(err))
		}
		return v
	}
}

func connect(tb testing.TB, cfg jetstream.ConnConfig) *nats.Conn {
	tb.Helper()
	nc := must(jetstream.Connect(tb.Context(), cfg))(tb)
	closed := make(chan struct{})
	nc.SetClosedHandler(func(*nats.Conn) { close(closed) })
	tb.Cleanup(func() {
		nc.Close()
		<-closed
	})
	return nc
}

// newStream is a fresh server with one stream, EVENTS unless edited.
func newStream(tb testing.TB, opts testenv.NATSOptions, edit func(*natsjs.StreamConfig)) (*nats.Conn, natsjs.Stream) {
	tb.Helper()
	nc := connect(tb, jetstream.ConnConfig{URL: testenv.NewNATS(tb, opts).URL()})
	cfg := natsjs.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}
	if edit != nil {
		edit(&cfg)
	}
	return nc, must(testenv.JetStream(tb, nc).CreateStream(tb.Context(), cfg))(tb)
}

// wantError checks the parts of an error's text, and that it carries a hint.
func wantError(tb testing.TB, err error, parts ...string) {
	tb.Helper()
	if err == nil {
		tb.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			tb.Errorf("error %q does not say %q", err, p)
		}
	}
	if hint.Of(err) == "" {
		tb.Errorf("error %q has no hint", err)
	}
}

func receive[T any](tb testing.TB, c <-chan T, what string) T {
	tb.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(testenv.Patience):
		tb.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}
