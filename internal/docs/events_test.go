package docs

import (
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
)

var headerName = regexp.MustCompile(`(?m)^\th[A-Z]\w+:\s+(\S+),$`)

// TestEventsPageTellsTheHeaders compares the table with the names of the headers that the relay can send.
func TestEventsPageTellsTheHeaders(t *testing.T) {
	const file = "docs/EVENTS.md"
	constants := map[string]string{
		"nats.MsgIdHdr": nats.MsgIdHdr, "nats.ExpectedLastSeqHdr": nats.ExpectedLastSeqHdr, "nats.ExpectedStreamHdr": nats.ExpectedStreamHdr,
		"jetstream.PositionHeader": jetstream.PositionHeader, "jetstream.ViaHeader": jetstream.ViaHeader, "jetstream.CommitHeader": jetstream.CommitHeader,
		"jetstream.ReplayOfHeader": jetstream.ReplayOfHeader,
	}
	var documented, coded []string
	for _, m := range headerName.FindAllStringSubmatch(read(t, "publish/headers.go"), -1) {
		name, literal := strings.CutPrefix(m[1], `"`)
		if name = strings.TrimSuffix(name, `"`); !literal {
			name = constants[m[1]]
		}
		coded = append(coded, name)
	}
	for _, row := range rows(section(t, file, "## Headers")) {
		documented = append(documented, row[0])
	}
	same(t, file, documented, coded)
}
