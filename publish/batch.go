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
)

// verdict is how a batch has stopped the lane.
type verdict struct {
	suspect int  // the size of a batch that one of its rows may have made fail
	refused bool // the server takes no batches such as the lane's
}

// judge finds out what made a batch of a size fail at its n-th message.
func (v *verdict) judge(err error, n, size int) {
	var ack *ackError
	errors.As(err, &ack)
	switch {
	case ack != nil && slices.Contains(batchRefusals, ack.ErrCode):
		v.refused = true
	case errors.Is(err, errBatch), ClassOf(err) == ClassRow,
		ack != nil && (ack.ErrCode == errBatchDuplicate || ack.ErrCode == errBatchIncomplete),
		ClassOf(err) == ClassChain && n > 1: // behind one that was taken for a duplicate
		v.suspect = min(size, maxAtomic) // of a larger one, what is before n is stored
	}
}

// dropBatchOf drops what has no reply of the batch that a message belongs to. The
// caller holds mu.
func (l *Lane) dropBatchOf(index uint64) {
	if l.unit.holds(index) {
		l.onBatchFailure(l.unit.first, 0, errBatch)
	}
}

// BatchFailed says how the lane was stopped by what became of a batch: suspect is its
// size where one of its rows may be the cause, of which the next lane should send as
// many one by one, to learn which it is; refused is set where the server takes no such
// batches at all.
func (l *Lane) BatchFailed() (suspect int, refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.verdict.suspect, l.verdict.refused
}

// onFastReply takes what comes to a message of a fast batch, or to its end. The
// caller holds mu.
func (l *Lane) onFastReply(msg *nats.Msg, id, state string) {
	own, index, _ := strings.Cut(id, "-")
	first, err := strconv.ParseUint(index, 36, 64)
	if err != nil || own != l.coder.id {
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

// endsAtomic reports whether a message is the last one of the atomic batch that waits for
// its PubAck. The caller holds mu.
func (l *Lane) endsAtomic(index uint64) bool {
	return l.stage.kind == jetstream.BatchAtomic && l.unit.holds(index) && l.unit.end() == index+1
}

// onBatch takes a PubAck of a batch. It proves the batch when its sequence is that of the
// batch's last message: whatever the server may have left out of it, as duplicates or by
// mistake, makes it smaller. The caller holds mu.
func (l *Lane) onBatch(first uint64, ack pubAck) {
	if u := &l.unit; !u.begins(first) || ack.Duplicate || ack.Count != uint64(u.n) ||
		ack.Seq != l.cfg.Base+first+ack.Count {
		l.onBatchFailure(first, 0, fmt.Errorf(
			"%w: the PubAck of the one at sequence %d counts %d to sequence %d",
			errBatch, l.cfg.Base+first+1, ack.Count, ack.Seq))
		return
	}
	l.unit.replied()
	for i := first; i < first+ack.Count; i++ {
		if s := l.ring.at(i); l.ring.holds(i) && s.state == sent {
			l.onStored(s, i, ack.Seq-ack.Count+i-first+1)
		}
	}
}

// onBatchFailure stops the lane: nothing of the batch will have another reply. Where
// the error is one row's own, that is its n-th. The caller holds mu.
func (l *Lane) onBatchFailure(first, n uint64, err error) {
	if !l.unit.begins(first) {
		return // it has failed already
	}
	end := l.unit.end()
	l.unit.replied()
	if l.err == nil {
		l.verdict.judge(err, int(n), int(end-first))
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
