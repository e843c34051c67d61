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

// verdict is how a batch has stopped the publisher.
type verdict struct {
	suspect int  // the size of a batch that one of its rows may have made fail
	refused bool // the server takes no batches such as the publisher's
}

// judge finds out what made a batch of a size fail at its n-th message.
func (v *verdict) judge(err error, n uint64, size int) {
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
func (p *Publisher) dropBatchOf(index uint64) {
	if p.unit.holds(index) {
		p.onBatchFailure(p.unit.first, 0, errBatch)
	}
}

// BatchFailed says how the publisher was stopped by what became of a batch: suspect is its
// size where one of its rows may be the cause, of which the next publisher should send as
// many one by one, to learn which it is; refused is set where the server takes no such
// batches at all.
func (p *Publisher) BatchFailed() (suspect int, refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.verdict.suspect, p.verdict.refused
}

// onFastReply takes what comes to a message of a fast batch, or to its end. The
// caller holds mu.
func (p *Publisher) onFastReply(msg *nats.Msg, id, state string) {
	own, index, _ := strings.Cut(id, "-")
	first, err := strconv.ParseUint(index, 36, 64)
	if err != nil || own != p.coder.id {
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
			_, err = parseAnyAck([]byte(`{"error":`+string(flow.Error)+`}`), p.cfg.Stream.Name())
		}
		p.onBatchFailure(first, flow.Sequence, err)
		return
	}
	ack, err := parseAck(msg, p.cfg.Stream.Name())
	if err != nil {
		p.onBatchFailure(first, n, err)
		return
	}
	p.onBatch(first, ack)
}

// endsAtomic reports whether a message is the last one of the atomic batch that waits for
// its PubAck. The caller holds mu.
func (p *Publisher) endsAtomic(index uint64) bool {
	return p.stage.kind == jetstream.BatchAtomic && p.unit.holds(index) && p.unit.end() == index+1
}

// onBatch takes a PubAck of a batch. It proves the batch when its sequence is that of the
// batch's last message: whatever the server may have left out of it, as duplicates or by
// mistake, makes it smaller. The caller holds mu.
func (p *Publisher) onBatch(first uint64, ack pubAck) {
	if u := &p.unit; !u.begins(first) || ack.Duplicate || ack.Count != uint64(u.n) ||
		ack.Seq != p.cfg.Base+first+ack.Count {
		p.onBatchFailure(first, 0, fmt.Errorf(
			"%w: the PubAck of the one at sequence %d counts %d to sequence %d",
			errBatch, p.cfg.Base+first+1, ack.Count, ack.Seq))
		return
	}
	p.unit.replied()
	for i := first; i < first+ack.Count; i++ {
		if s := p.ring.at(i); p.ring.holds(i) && s.state == sent {
			p.onStored(s, i, ack.Seq-ack.Count+i-first+1)
		}
	}
}

// onBatchFailure stops the publisher: nothing of the batch will have another reply. Where
// the error is one row's own, that is its n-th. The caller holds mu.
func (p *Publisher) onBatchFailure(first, n uint64, err error) {
	if !p.unit.begins(first) {
		return // it has failed already
	}
	size, end := p.unit.n, p.unit.end()
	p.unit.replied()
	if p.err == nil {
		p.verdict.judge(err, n, size)
	}
	if ClassOf(err) == ClassChain {
		err = fmt.Errorf("%w: %w", ErrChain, err)
	}
	p.failLocked(fmt.Errorf("publish: %w", err))
	for i := first; i < end; i++ {
		if s := p.ring.at(i); p.ring.holds(i) && s.state == sent {
			if n > 0 && i == first+n-1 {
				p.onFailure(s, err)
				continue
			}
			p.ring.replied(s, released)
			p.dropped++
		}
	}
}
