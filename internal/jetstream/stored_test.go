package jetstream_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// TestStoredMessage has the payload in either format, whatever that is, and the sum of the row's subject and headers.
func TestStoredMessage(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	nc := testenv.ConnectNATS(t, n.URL())
	defer nc.Close()
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{Name: "SUMS", Pattern: "sums.>"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), IDType: "bigint"}
	js := testenv.JetStream(t, nc)
	seq := uint64(0)
	for _, format := range []publish.Format{publish.FormatBinary, publish.FormatCloudEvents} {
		e, err := publish.NewEnvelope(publish.EnvelopeConfig{Source: "test", Stream: "SUMS", Format: format})
		if err != nil {
			t.Fatal(err)
		}
		for _, payload := range []string{`{"n": 1}`, "  [1,\t2]\n", "null", `"text"`, `a "text" \u0041`, " text ", "\xff\x00", ""} {
			ev := &outbox.Event{Table: table}
			ev.Values[outbox.ID], ev.Values[outbox.EventType], ev.Values[outbox.Payload] = fmt.Append(nil, seq), []byte("a.b"), []byte(payload)
			header, body, err := e.Build(ev, publish.Stamp{Ref: ev.Ref()})
			if err != nil {
				t.Fatal(err)
			}
			msg := nats.NewMsg("sums.a")
			for line := range strings.SplitSeq(string(header), "\r\n") {
				if name, value, ok := strings.Cut(line, ": "); ok && name != nats.ExpectedStreamHdr {
					msg.Header.Set(name, value)
				}
			}
			msg.Data = body
			if _, err := js.PublishMsg(t.Context(), msg); err != nil {
				t.Fatal(err)
			}
			seq++
			m, err := s.Message(t.Context(), seq)
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Trim(payload, jetstream.Space); string(m.Payload()) != want {
				t.Errorf("%s: payload %q, want %q", format, m.Payload(), want)
			}
			if m.Sum() != jetstream.SumOfBlock("sums.a", header) {
				t.Errorf("%s, payload %q: the sum is another than the row's", format, payload)
			}
		}
	}
}

// TestMessageGone tells a message that is gone from a stream that is.
func TestMessageGone(t *testing.T) {
	nc := jetstream.ConnectFor(t, jetstream.ConnConfig{URL: testenv.NewNATS(t, testenv.NATSOptions{}).URL()})
	s := jetstream.Must(jetstream.NewStream(nc, jetstream.StreamConfig{Name: "GONE", Pattern: "gone.>"}))(t)
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Message(t.Context(), 1); !errors.Is(err, jetstream.ErrMessageGone) {
		t.Errorf("of an empty stream: %v", err)
	}
	if err := testenv.JetStream(t, nc).DeleteStream(t.Context(), "GONE"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Message(t.Context(), 1); errors.Is(err, jetstream.ErrMessageGone) || !errors.Is(err, natsjs.ErrStreamNotFound) {
		t.Errorf("of no stream: %v", err)
	}
}
