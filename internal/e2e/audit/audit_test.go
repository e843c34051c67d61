package audit

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/walpost/walpost/outbox"
)

// world is a table of n rows of three aggregates, relayed without a fault.
func world(n int) (rows []Row, messages []Message) {
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	for i := range n {
		id := strconv.Itoa(i + 1)
		r := Row{
			Ref: outbox.Ref{Table: table, ID: id, Hash: uint64(i)}, Aggregate: fmt.Sprintf("0/a/%d", i%3), Order: int64(i / 3),
			Payload: fmt.Sprintf(`{"i": %d}`, i),
		}
		rows = append(rows, r)
		messages = append(messages, Message{
			Seq: uint64(i + 1), Own: true, RawID: r.Ref.MessageID("s"), Body: r.Payload,
			ID:       outbox.MessageID{Table: table.String(), ID: id, Hash: uint64(i)},
			Position: outbox.Position{SystemID: "s", Timeline: 1, Commit: outbox.LSN(100 * (i/4 + 1)), N: uint32(i%4 + 1)},
		})
	}
	return rows, messages
}

func TestCompare(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(rows []Row, ms []Message) ([]Row, []Message)
		want  string
	}{
		"exact": {func(rows []Row, ms []Message) ([]Row, []Message) { return rows, ms }, ""},
		"a row is missing": {func(rows []Row, ms []Message) ([]Row, []Message) {
			return rows, append(ms[:5], ms[6:]...)
		}, "lost=1"},
		"a row comes again": {func(rows []Row, ms []Message) ([]Row, []Message) {
			again := ms[11]
			again.Seq = 13
			again.Position.Commit++
			return rows, append(ms, again)
		}, "duplicated=1"},
		"a row comes again with its old position": {func(rows []Row, ms []Message) ([]Row, []Message) {
			again := ms[4]
			again.Seq = 13
			return rows, append(ms, again)
		}, "duplicated=1 regressed=1"},
		"two rows of an aggregate change places": {func(rows []Row, ms []Message) ([]Row, []Message) {
			p, q := ms[4].Position, ms[7].Position
			ms[4], ms[7] = ms[7], ms[4]
			ms[4].Position, ms[7].Position = p, q
			return rows, ms
		}, "reordered=1"},
		"two rows of different aggregates change places": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[4], ms[5] = ms[5], ms[4]
			return rows, ms
		}, "regressed=1"},
		"the poller repeats a position": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[11].Position, ms[11].Polled = ms[10].Position, true
			return rows, ms
		}, ""},
		"the WAL's reader repeats a position": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[11].Position = ms[10].Position
			return rows, ms
		}, "regressed=1"},
		"a position is missing": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[3].Position = outbox.Position{}
			return rows, ms
		}, "regressed=1"},
		"a row was never committed": {func(rows []Row, ms []Message) ([]Row, []Message) {
			return rows[:11], ms
		}, "unknown=1"},
		"a message has another content's hash": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[2].ID.Hash++
			return rows, ms
		}, "lost=1 unknown=1"},
		"a message is another writer's": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[2].Own, ms[2].ID = false, outbox.MessageID{}
			return rows, ms
		}, "lost=1 unknown=1"},
		"a body is another": {func(rows []Row, ms []Message) ([]Row, []Message) {
			ms[2].Body = "{}"
			return rows, ms
		}, "altered=1"},
		"a row is not marked": {func(rows []Row, ms []Message) ([]Row, []Message) {
			rows[2].Pending = true
			return rows, ms
		}, "unmarked=1"},
	} {
		t.Run(name, func(t *testing.T) {
			report := Compare(test.spoil(world(12)))
			if got := counts(&report); got != test.want {
				t.Errorf("got %q, want %q\n%s", got, test.want, &report)
			}
			if report.Exact() != (test.want == "") {
				t.Errorf("Exact is %v", report.Exact())
			}
		})
	}
}

// counts are the report's counts that are not zero.
func counts(r *Report) string {
	var found []string
	for _, o := range r.offences() {
		if o.Count > 0 {
			found = append(found, fmt.Sprintf("%s=%d", o.name, o.Count))
		}
	}
	return strings.Join(found, " ")
}

func TestReportNamesTheFirstFew(t *testing.T) {
	rows, _ := world(12)
	report := Compare(rows, nil)
	s := report.String()
	if !strings.Contains(s, "rows=12 messages=0 lost=12 duplicated=0") || !strings.Contains(s, "; and 7 more") {
		t.Errorf("got %s", s)
	}
}
