// Package sdk has the official CloudEvents SDKs read messages, for tests.
package sdk

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	cenats "github.com/cloudevents/sdk-go/protocol/nats_jetstream/v2"
	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/cloudevents/sdk-go/v2/event"
	cehttp "github.com/cloudevents/sdk-go/v2/protocol/http"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Event is what an SDK has read.
type Event struct {
	ID      string          `json:"id"`
	Source  string          `json:"source"`
	Type    string          `json:"type"`
	Subject string          `json:"subject"`
	Data    json.RawMessage `json:"data"`
}

func (e Event) String() string {
	var data bytes.Buffer
	_ = json.Compact(&data, e.Data)
	return fmt.Sprintf("%s %s %s %s %s", e.Source, e.ID, e.Type, e.Subject, &data)
}

// Read has each SDK read every message, in the Go SDK's bindings of NATS and of HTTP and in JavaScript, and
// wants the same from all. It returns the events in the messages' order.
func Read(t *testing.T, messages []*natsjs.RawStreamMsg) (events []Event) {
	t.Helper()
	for _, m := range messages {
		overNATS := read(t, cenats.NewMessage(&nats.Msg{Header: m.Header, Data: m.Data}))
		overHTTP := read(t, cehttp.NewMessage(bridged(m.Header), io.NopCloser(bytes.NewReader(m.Data))))
		if overNATS.String() != overHTTP.String() {
			t.Errorf("sequence %d is %s over NATS, and %s over HTTP", m.Sequence, overNATS, overHTTP)
		}
		events = append(events, overNATS)
	}
	for i, e := range readJavaScript(t, messages) {
		if e.String() != events[i].String() {
			t.Errorf("sequence %d is %s in JavaScript, and %s in Go", messages[i].Sequence, e, events[i])
		}
	}
	return events
}

func read(t *testing.T, m binding.Message) Event {
	t.Helper()
	var e *event.Event
	e, err := binding.ToEvent(context.Background(), m)
	if err == nil {
		err = e.Validate()
	}
	if err != nil {
		t.Fatalf("CloudEvents SDK: %v", err)
	}
	return Event{e.ID(), e.Source(), e.Type(), e.Subject(), e.Data()}
}

// bridged are the headers as a bridge hands them on: the rules for NATS and HTTP are the same.
func bridged(h nats.Header) http.Header {
	headers := http.Header{}
	for name, values := range h {
		headers.Set(name, values[0])
	}
	return headers
}

//go:embed read.mjs
var program []byte

func readJavaScript(t *testing.T, messages []*natsjs.RawStreamMsg) (events []Event) {
	t.Helper()
	dir := t.TempDir()
	modules, err := filepath.Abs("../.cache/examples/node_modules") // a test's directory is one of the root's
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(modules, "cloudevents")); err != nil {
		t.Log("the CloudEvents SDK for JavaScript is not installed: run .ci/deps examples")
		return nil
	}
	script := filepath.Join(dir, "read.mjs")
	if err := os.WriteFile(script, program, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	var in, stderr bytes.Buffer
	for _, m := range messages {
		headers := map[string]string{}
		for name, values := range m.Header {
			headers[strings.ToLower(name)] = values[0]
		}
		err := json.NewEncoder(&in).Encode(map[string]any{"headers": headers, "body": m.Data})
		if err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "node", script)
	cmd.Stdin, cmd.Stderr = &in, &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("CloudEvents SDK for JavaScript: %v\n%s", err, &stderr)
	}
	d := json.NewDecoder(bytes.NewReader(out))
	for d.More() {
		var e Event
		if err := d.Decode(&e); err != nil {
			t.Fatal(err)
		}
		events = append(events, e)
	}
	if len(events) != len(messages) {
		t.Fatalf("the CloudEvents SDK for JavaScript has read %d of %d messages", len(events), len(messages))
	}
	return events
}
