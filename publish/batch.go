package publish

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

const (
	// maxAtomic is the server's limit on the messages of an atomic batch.
	maxAtomic = 1000
	// A fast batch has no limit of its own, and a part of it goes as soon as it is of such
	// a size. What gathers while a batch is under way is in the relay's memory: more of it
	// would make nothing faster.
	partMessages  = 256
	partBytes     = 192 << 10
	maxStage      = 1000
	maxStageBytes = 2 << 20
	// atomicLeast is how many messages of single rows have to wait for an atomic batch to
	// be worth it: a server without replicas makes a store for each, which takes it
	// milliseconds.
	atomicLeast = 32
)

// errBatch means that a batch was not stored as it was sent. Only the stream knows
// what of it was.
var errBatch = errors.New("a batch was not stored as it was sent")

// batches is the batching of a lane. What is sent is staged; one unit at a time, a
// message or a batch, is under way, and while it is, the next one gathers. So nothing
// is stored behind something that was refused: expectations that are under way
// together are only numbers, and a message of somebody else's moves the sequence to
// where a later one of them fits.
//
// A fast batch is written as its messages come, in parts, all but the newest: that is
// the last one as soon as nothing more comes, or the batch has become large. An atomic
// batch has to be complete before it is written.
//
// A PubAck proves a batch when its sequence is that of the batch's last message:
// whatever the server may have left out of it, as duplicates or by mistake, makes it
// smaller.
//
// The sender owns it, but for what mu guards.
type batches struct {
	kind   jetstream.Batching
	id     string // what the ids of the lane's batches begin with
	singly int    // so many messages are still to be sent by themselves

	unit uint64 // the index of the first message of the unit that was written last
	open int    // so many messages of it were written, and it goes on; 0 where it is complete

	staged []staged
	arena  []byte     // their headers and bodies
	first  uint64     // the index of the first one
	whole  int        // the first so many are all of their transactions
	commit outbox.LSN // of the last one, 0 where the table brought it

	// Guarded by the lane's mu: the batches without a PubAck, up to where units are
	// complete, whether the sender has left something staged because a unit was
	// under way, and whether a batch has stopped the lane.
	sent    []sentBatch
	written uint64
	due     bool
	suspect int  // the size of a batch that one of its rows may have made fail
	refused bool // the server takes no batches such as the lane's
}

type sentBatch struct {
	first uint64
	n     int
}

// staged is a message that waits for its unit.
type staged struct {
	subject      string
	header, body int  // where they end; a header begins where the body before it ends
	alone        bool // a batch's headers would make it too large
	joined       bool // it is of the transaction of the one before
}

// EndTransaction says that all rows of the transaction were sent.
func (l *Lane) EndTransaction() {
	if l.batches.kind == jetstream.BatchAtomic {
		l.sending.Lock()
		defer l.sending.Unlock()
		if l.batches.whole = len(l.batches.staged); l.batches.whole > 0 {
			l.letLinger()
		}
	}
}

// judge finds out what made a batch of a size fail at its n-th message.
func (b *batches) judge(err error, n, size int) {
	var ack *ackError
	errors.As(err, &ack)
	switch {
	case ack != nil && slices.Contains(batchRefusals, ack.ErrCode):
		b.refused = true
	case errors.Is(err, errBatch), ClassOf(err) == ClassRow, ack != nil && (ack.ErrCode == errBatchDuplicate || ack.ErrCode == errBatchIncomplete),
		ClassOf(err) == ClassChain && n > 1: // behind one that was taken for a duplicate
		b.suspect = min(size, maxAtomic) // of a larger one, what is before n is stored
	}
}

// dropBatchOf drops what has no reply of the batch that a message belongs to. The
// caller holds mu.
func (l *Lane) dropBatchOf(index uint64) {
	for _, x := range l.batches.sent {
		if index >= x.first && index < x.first+uint64(x.n) {
			l.onBatchFailure(x.first, 0, errBatch)
			return
		}
	}
}

// forgetStaged drops what was never published, and a batch that will never end.
func (l *Lane) forgetStaged() {
	b := &l.batches
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.open > 0 {
		l.onBatchFailure(b.unit, 0, errBatch)
		b.open = 0
	}
	for i := range b.staged {
		if s := l.ring.at(b.first + uint64(i)); s.state == sent {
			l.ring.replied(s, settled)
			l.dropped++
		}
	}
	b.staged, b.arena, b.whole = nil, nil, 0
}

// BatchFailed says how the lane was stopped by what became of a batch: suspect is its
// size where one of its rows may be the cause, of which the next lane should send as
// many singly, to learn which it is; refused is set where the server takes no such
// batches at all.
func (l *Lane) BatchFailed() (suspect int, refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.batches.suspect, l.batches.refused
}

// onFastReply takes what comes to a message of a fast batch, or to its end. The
// caller holds mu.
func (l *Lane) onFastReply(msg *nats.Msg, id, state string) {
	own, index, _ := strings.Cut(id, "-")
	first, err := strconv.ParseUint(index, 36, 64)
	if err != nil || own != l.batches.id {
		return
	}
	f := strings.Split(state, ".")
	n, _ := strconv.ParseUint(f[min(2, len(f)-1)], 10, 64) // the message that it replies to
	var flow struct {
		Type     string          `json:"type"`
		Sequence uint64          `json:"seq"`
		Error    json.RawMessage `json:"error"`
	}
	if bytes.HasPrefix(msg.Data, []byte(`{"type":`)) && json.Unmarshal(msg.Data, &flow) == nil {
		err := fmt.Errorf("a message of a batch was lost: %s", excerpt(msg.Data))
		if flow.Type == "err" {
			_, err = parseAnyAck([]byte(`{"error":`+string(flow.Error)+`}`), l.cfg.Stream.Name())
		}
		l.onBatchFailure(first, flow.Sequence, err)
		return
	}
	ack, err := parseAck(msg, l.cfg.Stream.Name())
	if err != nil {
		l.onBatchFailure(first, n, err)
		return
	}
	l.onBatch(first, ack)
}

// batchTo finds the atomic batch of which a message is the last. The caller holds mu.
func (l *Lane) batchTo(index uint64) (first uint64, ok bool) {
	for _, x := range l.batches.sent {
		if x.first+uint64(x.n)-1 == index {
			return x.first, l.batches.kind == jetstream.BatchAtomic
		}
	}
	return 0, false
}

// onBatch takes a PubAck of a batch. The caller holds mu.
func (l *Lane) onBatch(first uint64, ack pubAck) {
	b := &l.batches
	i := slices.IndexFunc(b.sent, func(x sentBatch) bool { return x.first == first })
	if i < 0 || ack.Duplicate || ack.Count != uint64(b.sent[i].n) || ack.Seq != l.cfg.Base+first+ack.Count {
		l.onBatchFailure(first, 0, fmt.Errorf("%w: the PubAck of the one at sequence %d counts %d to sequence %d", errBatch, l.cfg.Base+first+1, ack.Count, ack.Seq))
		return
	}
	b.sent = slices.Delete(b.sent, i, i+1)
	for i := first; i < first+ack.Count; i++ {
		if s := l.ring.at(i); l.ring.holds(i) && s.state == sent {
			l.onStored(s, i, ack.Seq-ack.Count+i-first+1)
		}
	}
}

// onBatchFailure stops the lane: nothing of the batch will have another reply. Where
// the error is one row's own, that is its n-th. The caller holds mu.
func (l *Lane) onBatchFailure(first, n uint64, err error) {
	b := slices.IndexFunc(l.batches.sent, func(x sentBatch) bool { return x.first == first })
	if b < 0 {
		return // it has failed already
	}
	end := first + uint64(l.batches.sent[b].n)
	l.batches.sent = slices.Delete(l.batches.sent, b, b+1)
	if l.err == nil {
		l.batches.judge(err, int(n), int(end-first))
	}
	if ClassOf(err) == ClassChain {
		err = fmt.Errorf("%w: %w", ErrChain, err)
	}
	l.failLocked(fmt.Errorf("publish: %w", err))
	for i := first; i < end; i++ {
		if s := l.ring.at(i); l.ring.holds(i) && s.state == sent {
			if n > 0 && i == first+n-1 {
				l.onFailure(s, err)
				continue
			}
			l.ring.replied(s, settled)
			l.dropped++
		}
	}
}
