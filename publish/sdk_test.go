package publish

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/cloudevents/sdk-go/v2/event"
	cehttp "github.com/cloudevents/sdk-go/v2/protocol/http"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestSDKReadsMessages has the CloudEvents SDK read stored messages, whose headers a
// bridge has handed on as HTTP's: the rules for NATS and HTTP are the same.
func TestSDKReadsMessages(t *testing.T) {
	nc, stream := newStream(t, testenv.NATSOptions{}, nil)
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		e := newEnvelope(t, format)
		for payload, kind := range map[string]string{
			`{"b":1.50, "a":[1,2]}`: "application/json", `"text"`: "application/json", "null": "application/json",
			"": "", "plain text": textType, `{"a":1`: textType, `\x00ff`: textType, "\xff\x00": "application/octet-stream",
		} {
			ev := testEvent(outbox.ID, string(format), outbox.Payload, payload)
			st := testStamp(ev)
			st.Chained = false
			msg := build(t, e, ev, st)
			msg.Subject = "events.order.placed"
			reply := must(nc.RequestMsg(msg, 5*time.Second))(t)
			ack, err := parseAck(reply, "EVENTS")
			if err != nil || ack.Duplicate {
				t.Fatal(err, ack)
			}
			stored := must(stream.GetMsg(t.Context(), ack.Seq))(t)
			got, err := sdkReads(t.Context(), stored.Header, stored.Data)
			if err != nil {
				t.Errorf("%s, payload %q: %v", format, payload, err)
				continue
			}
			if got.DataContentType() != kind || string(got.Data()) != payload {
				t.Errorf("%s: data %q (%s) of payload %q (%s)", format, got.Data(), got.DataContentType(), payload, kind)
			}
			if got.ID() != ev.Ref().String() || got.Source() != "7300/shop" || got.Type() != "order.placed" ||
				got.Subject() != "order/1001" || got.Extensions()["tenantid"] != "3" {
				t.Errorf("%s: read as %v", format, got)
			}
			if want := time.Date(2026, 11, 20, 9, 0, 0, 250_000_000, time.UTC); !got.Time().Equal(want) {
				t.Errorf("%s: time %v, want %v", format, got.Time(), want)
			}
		}
	}
}

// sdkReads refuses what the specification does: one attribute that is given twice.
func sdkReads(ctx context.Context, stored nats.Header, body []byte) (*event.Event, error) {
	headers := http.Header{}
	for name, values := range stored {
		if lower := strings.ToLower(name); strings.HasPrefix(lower, "ce-") || lower == "content-type" {
			headers.Set(name, values[0])
		}
	}
	got, err := binding.ToEvent(ctx, cehttp.NewMessage(headers, io.NopCloser(bytes.NewReader(body))))
	if err != nil {
		return nil, err
	}
	return got, got.Validate()
}
