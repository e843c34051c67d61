package relay

import (
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// history is what the sessions of this process leave to the next one. The leader's goroutine owns it. While a
// session works, that goroutine waits, and some fields belong to goroutines of the session: published to
// watchFacts, unreplayable and stuckReplay to the replayer.
type history struct {
	lastSeq      uint64    // greatest sequence of a PubAck
	stored       int64     // messages
	created      time.Time // of the stream
	advance      bool      // the last session stored or recorded something
	base         uint64    // the sequence that the last publisher began behind
	publishedSeq uint64    // the last publisher's greatest sequence
	chained      bool      // the last session ended in a chain error
	displaced    int       // sessions in a row that a chain error ended before a row was stored
	rivals       int       // consecutive sessions that another relay seems to have broken
	suspect      int       // the size of the last publisher's batch that one of its rows may have made fail
	// batchesAt is when batches are tried again that the server has refused.
	batchesAt time.Time
	conn      string // the connection to NATS that the last session began on
	// unusable is why the last session's slot has to be recreated.
	unusable   error
	unsendable unsendable
	stuck      stuck // starts that ended alike
	remakes    bool  // a slot is being made in the place of an earlier one
	remembered bool  // outbox_sent has the slot
	judged     bool  // it was asked whether the slot that is there can be another program's
	// answered is the timeline on which the tables were answered before the WAL was read.
	answered uint32
	// compared is the stream that the last session has compared with the tables, where it
	// ended with errInsertsRead.
	compared compared

	published published
	// unreplayable are rows that JetStream refused when they were published again. The replayer reads it.
	unreplayable map[replayedRow]error
	stuckReplay  stuckReplay // the replayer's
}

// stuckReplay is a request that was taken up several times at the same cursor.
type stuckReplay struct {
	id    int64
	at    table.ReplayCursor
	times int
}

// mostUnreplayable bounds history.unreplayable: rows that are forgotten are refused once more.
const mostUnreplayable = 10_000

// compared is a stream that was compared with the tables, and how many rows it had lost.
type compared struct {
	stream     *jetstream.StreamInfo
	healed     int
	incomplete map[*outbox.Table]bool
}

// holds reports whether the stream is the one that was compared, and has lost nothing since, as far as
// can be seen.
func (c compared) holds(info *jetstream.StreamInfo) bool {
	return c.stream != nil && info.Created.Equal(c.stream.Created) && info.LastSeq >= c.stream.LastSeq
}
