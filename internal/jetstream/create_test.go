package jetstream

import (
	"os"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestAddCommand: the command has what differs from the defaults of the nats CLI, and OPERATIONS has it as it is for
// the default configuration.
func TestAddCommand(t *testing.T) {
	nc := connect(t, ConnConfig{URL: testenv.NewNATS(t, testenv.NATSOptions{}).URL()})
	standard := StreamConfig{Name: "EVENTS", Pattern: "events.>", Batching: BatchAuto}
	of := func(change func(*StreamConfig)) StreamConfig {
		c := standard
		change(&c)
		return c
	}
	const begin, end = "nats stream add EVENTS --subjects='events.>' --discard=new ", " --defaults"
	for _, c := range []struct {
		cfg  StreamConfig
		want string
	}{
		{standard, begin + "--dupe-window=100ms --allow-fast" + end},
		{of(func(c *StreamConfig) { c.Batching = BatchAtomic }), begin + "--dupe-window=100ms --allow-batch" + end},
		{of(func(c *StreamConfig) { c.Batching = BatchSingle }), begin + "--dupe-window=5s" + end},
		{of(func(c *StreamConfig) { c.Shared = true }), begin + "--dupe-window=2m0s --allow-fast" + end},
		{of(func(c *StreamConfig) { c.Domain = "leaf" }), begin + "--dupe-window=100ms --allow-fast --js-domain=leaf" + end},
		{
			of(func(c *StreamConfig) { c.Pattern, c.Partitions = "*.events.>", 2 }),
			"nats stream add EVENTS --subjects='0.events.>' --subjects='1.events.>' --discard=new --dupe-window=100ms --allow-fast" + end,
		},
	} {
		if got := must(NewStream(nc, c.cfg))(t).AddCommand(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
	page := must(os.ReadFile("../../docs/OPERATIONS.md"))(t)
	if command := must(NewStream(nc, standard))(t).AddCommand(); !strings.Contains(string(page), "\n"+command+"\n") {
		t.Errorf("docs/OPERATIONS.md lacks %s", command)
	}
}
