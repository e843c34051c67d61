package publish

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/walpost/walpost/outbox"
)

func TestEnvelopeCloudEvents(t *testing.T) {
	e := newEnvelope(t, FormatCloudEvents)
	ev := testEvent(outbox.AggregateType, `or"der`, outbox.TenantID, "a\nb")
	st := testStamp(ev)
	msg := build(t, e, ev, st)
	wantHeaders(t, msg.Header, map[string]string{
		"Nats-Msg-Id":                 st.Ref.MessageID("7300/shop"),
		"Walpost-Position":            st.Position.String(),
		"Nats-Expected-Last-Sequence": "0",
		"Nats-Expected-Stream":        "EVENTS",
		"content-type":                "application/cloudevents+json",
		"traceparent":                 string(ev.Values[outbox.TraceID]),
	})
	want := `{"specversion":"1.0","id":"` + st.Ref.String() + `","source":"7300/shop","type":"order.placed",` +
		`"subject":"or\"der/1001","time":"2026-11-20T09:00:00.25Z","tenantid":"a\u000Ab","aggregatetype":"or\"der",` +
		`"aggregateid":"1001","aggregateversion":"9","eventversion":"1",` +
		`"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",` +
		`"datacontenttype":"application/json","data":{"b":1.50, "a":[1,2]}}`
	if string(msg.Data) != want {
		t.Errorf("body\n%s\nwant\n%s", msg.Data, want)
	}
	for _, payload := range []string{
		`{"big":12345678901234567890.10}`, "null", `"text"`, " [1] ", "", `{"a":1},"id":"forged"`, `{"a":1`, "plain text", `\x00ff`, "\xff", `"` + "\xff" + `"`,
		strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000),
	} {
		ev := testEvent(outbox.Payload, payload, outbox.TraceID, "t-1")
		msg := build(t, e, ev, testStamp(ev))
		checkCloudEvent(t, msg.Data, ev)
		if msg.Header["traceparent"] != nil {
			t.Errorf("headers %q", msg.Header)
		}
	}
}

// checkCloudEvent reads the body as a consumer would.
func checkCloudEvent(t *testing.T, body []byte, ev *outbox.Event) {
	t.Helper()
	var got map[string]json.RawMessage
	if err := json.Unmarshal(body, &got); err != nil || !utf8.Valid(body) {
		t.Fatalf("body %q: %v", body, err)
	}
	var attrs struct {
		ID, Source, Type, Subject, TraceID string
		Content                            string `json:"datacontenttype"`
		Binary                             []byte `json:"data_base64"`
	}
	if err := json.Unmarshal(body, &attrs); err != nil {
		t.Fatalf("body %q: %v", body, err)
	}
	if attrs.ID != ev.Ref().String() || attrs.Source != "7300/shop" ||
		attrs.Type != string([]rune(string(ev.Values[outbox.EventType]))) {
		t.Errorf("attributes %+v of %q", attrs, ev.Values)
	}
	payload := string(ev.Values[outbox.Payload])
	data, isJSON := got["data"]
	switch {
	case payload == "":
		if isJSON || got["data_base64"] != nil || attrs.Content != "" {
			t.Errorf("body %q of a NULL payload", body)
		}
	case attrs.Content == "application/json":
		if string(data) != strings.TrimSpace(payload) || attrs.Content != "application/json" {
			t.Errorf("data %q of payload %q", data, payload)
		}
	case !isJSON && attrs.Binary == nil:
		t.Errorf("no data of payload %q", payload)
	case utf8.ValidString(payload):
		var text string
		if err := json.Unmarshal(data, &text); err != nil || text != payload || attrs.Content != textType {
			t.Errorf("data %s (%s) of payload %q", data, attrs.Content, payload)
		}
	case string(attrs.Binary) != payload || attrs.Content != "application/octet-stream":
		t.Errorf("data_base64 %q of payload %q", attrs.Binary, payload)
	}
	known := map[string]bool{}
	for _, k := range strings.Fields("specversion id source type subject time tenantid aggregatetype aggregateid " +
		"aggregateversion eventversion traceparent traceid datacontenttype data data_base64") {
		known[k] = true
	}
	for k := range maps.Keys(got) {
		if !known[k] {
			t.Errorf("unexpected attribute %q", k)
		}
	}
}
