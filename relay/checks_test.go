package relay_test

import (
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestDoctorsOwnChecksAreDocumented: the operator's handbook lists what only doctor checks.
func TestDoctorsOwnChecksAreDocumented(t *testing.T) {
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	r, err := relay.New(relay.Config{
		Subject: "events.{event_type}", Outboxes: []*outbox.Table{table},
	}, zap.NewNop(), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(text), "Only doctor makes these checks:\n\n")
	list, _, _ = strings.Cut(list, "\n\n")
	want := "- " + strings.Join(r.DoctorsOwnChecks(), "\n- ")
	if list != want {
		t.Errorf("docs/OPERATIONS.md has\n%s\nwant\n%s", list, want)
	}
}
