package relay

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/jackc/pgerrcode"
	"github.com/nats-io/nats.go"
	natsstream "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// place is where the relay meets a failure.
type place string

const (
	atStart      place = "a start"
	atSlot       place = "the look at the slot"
	atStream     place = "the wait for the stream"
	inLookup     place = "the recovery and look-ups"
	inRow        place = "a row's message"
	inSettling   place = "marks and records"
	inSearch     place = "the poller's searches"
	inCheck      place = "checks while a session runs"
	inReplay     place = "a replay"
	atSessionEnd place = "the end of a session"
)

// outcome is what happens next.
type outcome string

const (
	waitOut      outcome = "waited out"
	parkRow      outcome = "parks the row"
	endStatement outcome = "ends the statement"
	endReplay    outcome = "ends the replay"
	pollTables   outcome = "polls the tables"
	recreateSlot outcome = "recreates the slot"
	standBy      outcome = "stands by"
	endSession   outcome = "ends the session"
	endTerm      outcome = "ends the term"
	refuseStart  outcome = "refuses the start"
)

// failure is a row of the table: a failure of this kind has this outcome.
type failure struct {
	what    string
	is      func(error) bool
	outcome outcome
	// after says more of the outcome, for the page.
	after string
	// reason is the label of walpost_sessions_total. If it is empty, reasonOf takes it from the error.
	reason string
	// alarm tells of the failure; nil if only the log does.
	alarm *alarm.Alarm
	// passes: the cause passes, or has its own alarm. Such failures do not count for the alarm no_progress.
	passes bool
}

func on(what string, is func(error) bool, then outcome) failure {
	return failure{what: what, is: is, outcome: then}
}

func (f failure) and(after string) failure      { f.after = after; return f }
func (f failure) as(reason string) failure      { f.reason = reason; return f }
func (f failure) alarms(a *alarm.Alarm) failure { f.alarm = a; return f }
func (f failure) passing() failure              { f.passes = true; return f }

// failureOf returns the first row of a place that fits an error. The last row of each place fits any error.
func failureOf(where place, err error) failure {
	i := slices.IndexFunc(failures[where], func(f failure) bool { return f.is(err) })
	f := failures[where][i]
	if f.reason == "" {
		f.reason = reasonOf(err)
	}
	return f
}

// failures is the table. docs/ARCHITECTURE.md shows it: go test ./relay -run FailuresPage -update.
var failures = map[place][]failure{
	atStart: {
		on("PostgreSQL starts, stops or is full, or a table is locked", startsSoon, waitOut),
		on("PostgreSQL refuses a password, a database, a table", hasCode, refuseStart),
		on("JetStream has no leader, or too few servers", leaderless, waitOut),
		on("JetStream is off, or a limit is reached", isA[*natsstream.APIError], refuseStart),
		on("NATS is away, or has no responders", isAny(
			nats.ErrNoServers, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected,
			nats.ErrConnectionClosed, nats.ErrStaleConnection, nats.ErrReconnectBufExceeded,
			nats.ErrMaxConnectionsExceeded, nats.ErrMaxAccountConnectionsExceeded), waitOut),
		on("a socket may not be opened", isAny(fs.ErrPermission), refuseStart),
		on("a name does not resolve", isA[*net.DNSError], waitOut),
		on("the network fails", networkFails, waitOut),
		on("anything else", anyError, refuseStart).and("the error says what to change"),
	},
	atSlot: {
		on("the server or the role does not let the WAL be read", isAny(stream.ErrCannotStream), pollTables).
			and("in mode `auto`; in mode `stream` the session ends"),
		on("there is no slot", isAny(stream.ErrNoSlot), recreateSlot).and("the tables deliver meanwhile"),
		on("the slot is lost", isAny(stream.ErrSlotLost), recreateSlot).
			and("the tables deliver meanwhile").alarms(alarm.SlotGivenUp),
		on("no slot is free", isAny(stream.ErrNoFreeSlot), recreateSlot).
			and("when it can; the tables deliver meanwhile").alarms(alarm.SlotNotMade),
		on("the slot is another program's", isAny(stream.ErrForeignSlot), recreateSlot).
			and("when that slot is gone; the tables deliver meanwhile").alarms(alarm.SlotForeign),
		on("anything else", anyError, endSession),
	},
	atStream: {
		on("the stream was edited into one that a start refuses", isAny(errStreamUnfit), waitOut).
			and("the replication connection is kept").alarms(alarm.StreamUnfit),
		on("the stream does not exist any more", isAny(jetstream.ErrStreamNotFound), waitOut).
			and("the replication connection is kept").alarms(alarm.StreamGone),
		on("anything else", anyError, waitOut).and("the replication connection is kept"),
	},
	inLookup: {
		on("a table is locked, a disk is full", table.IsTemporary, waitOut),
		on("anything else", anyError, endSession),
	},
	inRow: {
		on("the row fails a check", isA[*outbox.RowError], parkRow).
			and("its aggregate is held; the poller tries it again until it is a dead letter"),
		on("anything else", anyError, endSession),
	},
	inSettling: {
		on("the table is another one, or its ids are", isAny(table.ErrTableChanged), endTerm),
		on("a table is locked", table.IsLocked, waitOut).and("the slot waits").alarms(alarm.RowLocked),
		on("a disk is full, a deadlock, a time limit", table.IsTemporary, waitOut).and("the slot waits"),
		on("anything else", anyError, endStatement).
			and("fewer rows are settled at a time; the slot waits for a row that is refused").
			alarms(alarm.RowUnsettled),
	},
	inSearch: {
		on("PostgreSQL stops", hasCodeOf("57P"), endSession),
		on("anything else", anyError, waitOut),
	},
	inCheck: {
		on("the table is another one, or its ids are", isAny(table.ErrTableChanged), endTerm),
		on("the stream is gone, recreated or unfit, or lacks acknowledged messages",
			isAny(jetstream.ErrStreamNotFound, errStreamReplaced, errStreamUnfit, errStreamLost), endSession),
		on("the publication has an outbox in another way", isAny(errModeChanged), endSession).
			and("that outbox joins"),
		on("anything else", anyError, waitOut),
	},
	inReplay: {
		on("the request cannot be fulfilled", isAny(errReplay, jetstream.ErrStreamNotFound), endReplay),
		on("PostgreSQL refuses a statement", table.IsRefused, endReplay),
		on("anything else", anyError, waitOut),
	},
	atSessionEnd: {
		on("the relay is stopped", isAny(errStopped), endTerm).as("stopped"),
		on("the rows come another way from now on", isAny(errModeChanged), endSession).
			and("the next one begins at once").as("mode_changed"),
		on("another process streams the slot", isAny(stream.ErrSlotActive), standBy).
			and("with the lock, until the slot is free").as("slot_active").alarms(alarm.SlotInUse).passing(),
		on("another relay delivers some of the same rows", isAny(errSharedRows), standBy).
			and("with the lock, until that relay has ended").
			as("outbox_shared").alarms(alarm.OutboxShared).passing(),
		on("another relay writes to the stream, in two sessions in a row", isAny(ErrRival), endTerm).
			as("rival").alarms(alarm.Rival).passing(),
		on("the table is another one, its ids are, or it does not fit",
			isAny(table.ErrTableChanged), endTerm).
			and("an outbox that does not fit is set aside"),
		on("the slot keeps more WAL than it may", isAny(errOverBudget), recreateSlot).
			as("over_budget").passing(),
		on("the server cannot send a row, three times", isAny(errUnsendable), recreateSlot).
			and("behind the row").alarms(alarm.Unsendable),
		on("the server left rows out", isAny(stream.ErrPublicationSkipped), recreateSlot).
			as("publication_skipped").alarms(alarm.PublicationSkipped).passing(),
		on("a row does not fit the layout", isAny(stream.ErrUndecodable), recreateSlot).
			and("behind the row").alarms(alarm.Undecodable),
		on("the slot is older than the publication", isAny(stream.ErrBeforePublication), recreateSlot),
		on("the slot is lost", isAny(stream.ErrSlotLost), recreateSlot).as("slot_lost").passing(),
		on("the slot does not exist", isAny(stream.ErrNoSlot), endSession).as("slot_lost").passing(),
		on("JetStream refuses an expected sequence", isAny(publish.ErrChain), endSession).
			as("chain").passing(),
		on("nothing shows whether a duplicate is stored", isAny(publish.ErrDoubtful), endSession).
			as("duplicate"),
		on("no PubAck comes in time", isAny(publish.ErrAckTimeout), endSession).as("ack_timeout").passing(),
		on("the NATS connection is lost",
			isAny(nats.ErrDisconnected, nats.ErrReconnectBufExceeded), endSession).
			as("nats_away").passing(),
		on("JetStream does not respond", isAny(publish.ErrNoResponders), endSession).
			as("no_responders").passing(),
		on("the stream does not exist any more", isAny(jetstream.ErrStreamNotFound), endSession).
			as("stream_gone").alarms(alarm.StreamGone),
		on("the stream was deleted and recreated", isAny(errStreamReplaced), endSession).
			as("stream_replaced").alarms(alarm.StreamReplaced),
		on("the stream ends before an acknowledged message", isAny(errStreamLost), endSession).
			and("the next one compares marks with the stream").as("stream_lost"),
		on("the stream was edited into one that a start refuses", isAny(errStreamUnfit), endSession).
			as("stream_unfit").alarms(alarm.StreamUnfit),
		on("PostgreSQL is away, stops or is full, or a table is locked", postgresAway, endSession).passing(),
		on("a question about an outbox is open", isQuestion, endTerm).and("that outbox is set aside"),
		on("anything else", anyError, endSession).
			and("the third start in a row that ends so raises the alarm").alarms(alarm.NoProgress),
	},
}

// reasonOf is the label of a failure that the table gives none.
func reasonOf(err error) string {
	switch {
	case pg.Code(err) != "":
		return "postgres_" + pg.Code(err)
	case table.Away(err):
		return "postgres_away"
	case publish.ClassOf(err) != publish.ClassUnknown:
		return "jetstream_" + publish.ClassOf(err).String()
	}
	return "other"
}

// rowFailure returns what parks the row, nil where the failure is not the row's.
func rowFailure(err error) *outbox.RowError {
	var failure *outbox.RowError
	if failureOf(inRow, err).outcome == parkRow {
		errors.As(err, &failure)
	}
	return failure
}

// endsStatement reports whether rows are marked or recorded in smaller statements from now on.
func endsStatement(err error) bool { return failureOf(inSettling, err).outcome == endStatement }

// waitsOut reports whether a statement of a recovery or a look-up is run again.
func waitsOut(err error) bool { return failureOf(inLookup, err).outcome == waitOut }

// cannotStream reports whether the tables are polled where the mode leaves the choice.
func cannotStream(err error) bool { return failureOf(atSlot, err).outcome == pollTables }

func anyError(error) bool { return true }

func isAny(targets ...error) func(error) bool {
	return func(err error) bool {
		return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
	}
}

func isA[E error](err error) bool {
	var target E
	return errors.As(err, &target)
}

func isQuestion(err error) bool { return hint.CodeOf(err) == "table-initial" }

func hasCode(err error) bool { return pg.Code(err) != "" }

func hasCodeOf(classes ...string) func(error) bool {
	return func(err error) bool {
		return slices.ContainsFunc(classes, func(class string) bool {
			return strings.HasPrefix(pg.Code(err), class)
		})
	}
}

func startsSoon(err error) bool {
	return table.IsTemporary(err) || hasCodeOf(pgerrcode.AdminShutdown, pgerrcode.CrashShutdown,
		pgerrcode.CannotConnectNow, pgerrcode.TooManyConnections)(err)
}

func postgresAway(err error) bool {
	return table.Away(err) || table.IsLocked(err) || hasCodeOf("57P", "53", "08")(err)
}

// leaderless: JetStream has no leader, or not the servers that it needs. Limits and a JetStream that is off
// stay until somebody changes them.
func leaderless(err error) bool {
	var api *natsstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	const noPeers, notEnabled, notEnabledForAccount, noReplicas = 10005, 10076, 10039, 10074
	switch api.ErrorCode {
	case noPeers:
		return true
	// the last two: no room within the limits
	case notEnabled, notEnabledForAccount, noReplicas, 10023, 10047:
		return false
	}
	return api.Code >= 500
}

// networkFails is false for an alert of TLS ("remote error"): the server refuses.
func networkFails(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) {
		return !strings.HasSuffix(op.Op, " error")
	}
	return isAny(
		io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, os.ErrDeadlineExceeded,
		context.DeadlineExceeded,
	)(err)
}
