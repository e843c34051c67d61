package relay

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	natsstream "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

var update = flag.Bool("update", false, "write the table of failures in docs/ARCHITECTURE.md")

func postgres(code string) error { return &pgconn.PgError{Code: code} }

func api(code int, number natsstream.ErrorCode) error {
	return &natsstream.APIError{Code: code, ErrorCode: number}
}

// example is a failure at a place: the row of the table that must fit it, by its number, and what happens then.
type example struct {
	err     error
	row     int
	outcome outcome
}

var examples = map[place][]example{
	atStart: {
		{postgres("57P03"), 0, waitOut},
		{postgres("53300"), 0, waitOut},
		{postgres("55P03"), 0, waitOut},
		{postgres("53100"), 0, waitOut},
		{fmt.Errorf("%w: %w", postgres("57P01"), io.EOF), 0, waitOut},
		{postgres("28P01"), 1, refuseStart},
		{fmt.Errorf("%w: %w", postgres("3D000"), io.EOF), 1, refuseStart},
		{api(500, 10005), 2, waitOut},
		{api(503, 10008), 2, waitOut},
		{api(503, 10076), 3, refuseStart},
		{api(500, 10047), 3, refuseStart},
		{api(400, 10025), 3, refuseStart},
		{nats.ErrNoServers, 4, waitOut},
		{nats.ErrTimeout, 4, waitOut},
		{&net.OpError{Op: "dial", Err: fs.ErrPermission}, 5, refuseStart},
		{&net.OpError{Op: "dial", Err: &net.DNSError{Name: "db"}}, 6, waitOut},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, 7, waitOut},
		{io.ErrUnexpectedEOF, 7, waitOut},
		{&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}, 8, refuseStart},
		{nats.ErrAuthorization, 8, refuseStart},
	},
	atSlot: {
		{stream.ErrCannotStream, 0, pollTables},
		{stream.ErrNoSlot, 1, recreateSlot},
		{stream.ErrSlotLost, 2, recreateSlot},
		{stream.ErrNoFreeSlot, 3, recreateSlot},
		{stream.ErrForeignSlot, 4, recreateSlot},
		{postgres("57P01"), 5, endSession},
	},
	atStream: {
		{errStreamUnfit, 0, waitOut},
		{jetstream.ErrStreamNotFound, 1, waitOut},
		{nats.ErrTimeout, 2, waitOut},
	},
	inLookup: {
		{postgres("55P03"), 0, waitOut},
		{postgres("57014"), 0, waitOut},
		{postgres("42501"), 1, endSession},
		{table.ErrTableChanged, 1, endSession},
	},
	inRow: {
		{&outbox.RowError{Class: outbox.RowSubject}, 0, parkRow},
		{publish.ErrAckTimeout, 1, endSession},
	},
	inSettling: {
		{table.ErrTableChanged, 0, endTerm},
		{postgres("55P03"), 1, waitOut},
		{postgres("40P01"), 2, waitOut},
		{postgres("53100"), 2, waitOut},
		{postgres("23514"), 3, endStatement},
	},
	inSearch: {
		{postgres("57P01"), 0, endSession},
		{postgres("57014"), 1, waitOut},
		{io.ErrUnexpectedEOF, 1, waitOut},
	},
	inCheck: {
		{table.ErrTableChanged, 0, endTerm},
		{errStreamReplaced, 1, endSession},
		{errStreamUnfit, 1, endSession},
		{errStreamLost, 1, endSession},
		{jetstream.ErrStreamNotFound, 1, endSession},
		{errModeChanged, 2, endSession},
		{postgres("55P03"), 3, waitOut},
	},
	inReplay: {
		{errReplay, 0, endReplay},
		{jetstream.ErrStreamNotFound, 0, endReplay},
		{postgres("42501"), 1, endReplay},
		{postgres("55P03"), 2, waitOut},
	},
	atSessionEnd: {
		{errStopped, 0, endTerm},
		{errModeChanged, 1, endSession},
		{fmt.Errorf("%w: %w", stream.ErrSlotActive, postgres("55006")), 2, standBy},
		{errSharedRows, 3, standBy},
		{ErrRival, 4, endTerm},
		{table.ErrTableChanged, 5, endTerm},
		{errOverBudget, 6, recreateSlot},
		{fmt.Errorf("%w: %w", errUnsendable, postgres("22021")), 7, recreateSlot},
		{stream.ErrPublicationSkipped, 8, recreateSlot},
		{stream.ErrUndecodable, 9, recreateSlot},
		{fmt.Errorf("%w: %w", stream.ErrBeforePublication, postgres("42704")), 10, recreateSlot},
		{stream.ErrSlotLost, 11, recreateSlot},
		{stream.ErrNoSlot, 12, endSession},
		{publish.ErrChain, 13, endSession},
		{publish.ErrDoubtful, 14, endSession},
		{publish.ErrAckTimeout, 15, endSession},
		{nats.ErrDisconnected, 16, endSession},
		{publish.ErrNoResponders, 17, endSession},
		{jetstream.ErrStreamNotFound, 18, endSession},
		{errStreamReplaced, 19, endSession},
		{errStreamLost, 20, endSession},
		{errStreamUnfit, 21, endSession},
		{postgres("57P01"), 22, endSession},
		{postgres("08006"), 22, endSession},
		{postgres("55P03"), 22, endSession},
		{io.ErrUnexpectedEOF, 22, endSession},
		{hint.Coded("table-initial", errors.New("which start is it")), 23, endTerm},
		{postgres("42501"), 24, endSession},
		{errors.New("a proxy's answer"), 24, endSession},
	},
}

// TestFailures: every row of the table has an example, and the example leads to that row and to its outcome.
func TestFailures(t *testing.T) {
	if len(examples) != len(failures) || len(places) != len(failures) {
		t.Errorf("there are examples for %d places and %d on the page; the table has %d",
			len(examples), len(places), len(failures))
	}
	for where, rows := range failures {
		shown := map[int]bool{}
		for _, x := range examples[where] {
			shown[x.row] = true
			got := failureOf(where, hint.Wrap(fmt.Errorf("try it: %w", x.err), "do something"))
			if want := rows[x.row]; got.what != want.what || got.outcome != x.outcome {
				t.Errorf("%s: %v is %q and %s; want %q and %s",
					where, x.err, got.what, got.outcome, want.what, x.outcome)
			}
		}
		if len(shown) != len(rows) {
			t.Errorf("%s: %d of %d rows have an example", where, len(shown), len(rows))
		}
	}
}

// TestReasons: the labels of walpost_sessions_total, and the failures that no_progress does not count.
func TestReasons(t *testing.T) {
	for _, x := range []struct {
		err    error
		reason string
		passes bool
	}{
		{errStopped, "stopped", false},
		{errModeChanged, "mode_changed", false},
		{stream.ErrSlotActive, "slot_active", true},
		{errSharedRows, "outbox_shared", true},
		{ErrRival, "rival", true},
		{errOverBudget, "over_budget", true},
		{fmt.Errorf("%w: %w", errUnsendable, postgres("22021")), "postgres_22021", false},
		{stream.ErrPublicationSkipped, "publication_skipped", true},
		{stream.ErrUndecodable, "other", false},
		{fmt.Errorf("%w: %w", stream.ErrSlotLost, postgres("55000")), "slot_lost", true},
		{stream.ErrNoSlot, "slot_lost", true},
		{publish.ErrChain, "chain", true},
		{publish.ErrDoubtful, "duplicate", false},
		{publish.ErrAckTimeout, "ack_timeout", true},
		{nats.ErrReconnectBufExceeded, "nats_away", true},
		{publish.ErrNoResponders, "no_responders", true},
		{jetstream.ErrStreamNotFound, "stream_gone", false},
		{errStreamReplaced, "stream_replaced", false},
		{errStreamLost, "stream_lost", false},
		{errStreamUnfit, "stream_unfit", false},
		{postgres("57P01"), "postgres_57P01", true},
		{postgres("53300"), "postgres_53300", true},
		{postgres("55P03"), "postgres_55P03", true},
		{syscall.ECONNRESET, "postgres_away", true},
		{postgres("42501"), "postgres_42501", false},
		{table.ErrTableChanged, "other", false},
		{errors.New("a proxy's answer"), "other", false},
	} {
		f := failureOf(atSessionEnd, fmt.Errorf("try it: %w", x.err))
		if f.reason != x.reason || f.passes != x.passes {
			t.Errorf("%v: reason %s, passes %v; want %s, %v", x.err, f.reason, f.passes, x.reason, x.passes)
		}
	}
}

// TestFailuresPage: docs/ARCHITECTURE.md has the table.
func TestFailuresPage(t *testing.T) {
	const file, begin, end = "../docs/ARCHITECTURE.md", "| Where | Failure |", "\n\n"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, began := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !began || !ended {
		t.Fatalf("%s has no table of failures", file)
	}
	page := before + failuresPage() + end + after
	if *update {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if page != string(text) {
		t.Errorf("%s has another table: run go test ./relay -run FailuresPage -update", file)
	}
}

// places are in the order of the page.
var places = []place{
	atStart, atSlot, atStream, inLookup, inRow, inSettling, inSearch, inCheck, inReplay, atSessionEnd,
}

func failuresPage() string {
	lines := []string{"| Where | Failure | What happens | Reason | Alarm |", "| --- | --- | --- | --- | --- |"}
	for _, where := range places {
		for _, f := range failures[where] {
			happens, reason, alarmed := string(f.outcome), "", ""
			if f.after != "" {
				happens += ": " + f.after
			}
			if f.reason != "" {
				reason = " `" + f.reason + "`"
			}
			if f.alarm != nil {
				alarmed = fmt.Sprintf(" [`%[1]s`](ALARMS.md#%[1]s)", f.alarm.Name())
			}
			lines = append(lines, fmt.Sprintf("| %s | %s | %s |%s |%s |", where, f.what, happens, reason, alarmed))
		}
	}
	return strings.Join(lines, "\n")
}
