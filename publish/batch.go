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

	"github.com/walpost/walpost/outbox"
)

// ErrBatch means that a batch was not stored as it was sent. Only the stream knows
// what of it was.
var ErrBatch = errors.New("a batch was not stored as it was sent")

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
	kind   Batching
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

// batched reports whether the lane stages what it sends.
func (l *Lane) batched() bool { return l.batches.kind == BatchFast || l.batches.kind == BatchAtomic }

// most is how many messages and bytes a unit has at most, and how many may be staged
// while one is under way.
func (l *Lane) most() (unit, unitBytes, staged, stagedBytes int) {
	unit, unitBytes = max(1, l.cfg.Window/2), l.cfg.WindowBytes/2
	staged, stagedBytes = min(unit, maxStage), min(unitBytes, maxStageBytes)
	switch b := &l.batches; {
	case b.singly > 0:
		staged = min(staged, 64)
	case b.kind == BatchFast:
		unit = max(unit, l.cfg.Window-maxStage)
	default: // what is written has to be staged as a whole
		unit = min(unit, maxAtomic)
		staged, stagedBytes = unit, unitBytes
	}
	return unit, unitBytes, staged, stagedBytes
}

// stage keeps a message for its unit. The caller has found a place for it.
func (l *Lane) stage(subject string, index uint64, commit outbox.LSN, header, body []byte, alone bool) {
	b := &l.batches
	if len(b.staged) == 0 {
		b.first = index
	}
	b.arena = append(b.arena, header...)
	s := staged{subject: subject, header: len(b.arena), alone: alone, joined: len(b.staged) > 0 && commit != 0 && commit == b.commit}
	b.commit = commit
	b.arena = append(b.arena, body...)
	s.body = len(b.arena)
	b.staged = append(b.staged, s)
}

// stageIsFull reports whether what is staged has to go before more is. The caller
// holds mu.
func (l *Lane) stageIsFull() bool {
	b := &l.batches
	_, _, messages, bytes := l.most()
	return len(b.staged) >= messages || len(b.arena) > bytes || !l.underWay() && b.isPart()
}

// isPart reports whether enough is staged for it to be written as a part of a fast batch.
func (b *batches) isPart() bool {
	return b.kind == BatchFast && b.singly == 0 && len(b.staged) > 1 && (len(b.staged) >= partMessages || len(b.arena) >= partBytes)
}

// underWay reports whether a unit waits for its PubAck. The caller holds mu.
func (l *Lane) underWay() bool { return l.ring.low < l.batches.written }

// publishStaged publishes the next unit, or a part of it, and says whether there was any,
// unless one is under way: then what is staged goes when that has its PubAck. More is set
// where more is to come at once: then a fast batch goes on, and an atomic one may end in
// the midst of a transaction.
func (l *Lane) publishStaged(more bool) (bool, error) {
	b := &l.batches
	l.mu.Lock()
	n := len(b.staged)
	if b.kind == BatchAtomic && !(more && b.whole == 0 && l.ring.inflight == n) {
		n = b.whole
	}
	if n == 0 {
		l.mu.Unlock()
		return false, nil
	}
	messages, bytes, _, _ := l.most()
	unit, goesOn := l.unitOf(n, more && b.isPart() && l.ring.inflight+partMessages <= messages && l.ring.bytes+partBytes <= bytes)
	wait := l.underWay()
	if wait {
		b.due = b.due || !more // with more the sender comes again itself
	} else {
		b.due = unit < n && !goesOn
	}
	if l.err != nil && !errors.Is(l.err, ErrDrained) {
		wait = true // in vain
	}
	l.mu.Unlock()
	if wait {
		return false, nil
	}
	b.singly -= min(b.singly, unit)
	return true, l.publishUnit(unit, goesOn)
}

// unitOf is how many of the first n staged messages go together, and whether the batch
// that they are of goes on after them: then one message stays, to be the last one.
func (l *Lane) unitOf(n int, goesOn bool) (int, bool) {
	b := &l.batches
	if b.singly > 0 {
		return 1, false
	}
	if b.kind == BatchAtomic && n > 1 && n < atomicLeast && !b.staged[1].joined {
		return 1, false
	}
	for i, s := range b.staged[:n] {
		if s.alone {
			return max(i, 1), false
		}
	}
	if goesOn {
		return n - 1, true
	}
	return n, false
}

// publishUnit writes the first n staged messages. A unit that goes on is not complete.
func (l *Lane) publishUnit(n int, goesOn bool) error {
	b := &l.batches
	if b.open == 0 {
		b.unit = b.first
	}
	total := b.open + n
	batch := goesOn || total > 1
	if batch {
		l.mu.Lock()
		err := l.announce(total)
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	start := 0
	for i, s := range b.staged[:n] {
		if i%64 == 63 { // large ones take their time
			if err := l.Err(); err != nil && !errors.Is(err, ErrDrained) {
				return err
			}
		}
		last := i == n-1 && !goesOn
		header := l.unitHeader(b.arena[start:s.header], b.open+i, batch, last, s.alone)
		if err := l.wire.publish(s.subject, l.unitReply(b.open+i, batch, last), header, b.arena[s.header:s.body]); err != nil {
			return err
		}
		start = s.body
	}
	if b.open = total; !goesOn {
		l.complete(total)
	} else {
		l.lingering = false
		l.letLinger() // from here on
	}
	rest := copy(b.arena, b.arena[start:])
	b.arena = b.arena[:rest]
	b.staged = slices.Delete(b.staged, 0, n)
	for i := range b.staged {
		b.staged[i].header -= start
		b.staged[i].body -= start
	}
	b.first += uint64(n)
	b.whole = max(0, b.whole-n)
	return nil
}

// announce notes how many messages of the batch were written, before they are: whatever
// makes it fail concerns all of them. The caller holds mu.
func (l *Lane) announce(total int) error {
	b := &l.batches
	if b.open == 0 {
		b.sent = append(b.sent, sentBatch{b.unit, total})
		return nil
	}
	i := slices.IndexFunc(b.sent, func(x sentBatch) bool { return x.first == b.unit })
	if i < 0 { // it has failed, or has got a PubAck that it was not to have yet
		return errors.Join(l.err, ErrBatch)
	}
	b.sent[i].n = total
	return nil
}

// complete notes that a unit is under way, in full.
func (l *Lane) complete(total int) {
	b := &l.batches
	l.mu.Lock()
	defer l.mu.Unlock()
	b.written, b.open = b.unit+uint64(total), 0
	for i := b.unit; i < b.written; i++ {
		if s := l.ring.at(i); s.state == sent {
			s.sentAt = l.ticks // the time for the PubAck begins when all is written
		}
	}
}

// unitHeader completes a header block with what only the unit knows. Of an atomic
// batch only the first message may expect a sequence. The stream's name is in the first
// message only: another stream, if one should get a later one, knows of no such batch and
// refuses it, and the header would cost NATS 4 % of its time.
func (l *Lane) unitHeader(block []byte, i int, batch, last, complete bool) []byte {
	if complete {
		return block
	}
	b := &l.batches
	h := append(l.header[:0], block[:len(block)-len(headerEnd)]...)
	atomic := b.kind == BatchAtomic && batch
	if i == 0 {
		h = append(h, nats.ExpectedStreamHdr+": "...)
		h = append(h, l.cfg.Stream.cfg.Name...)
		h = append(h, "\r\n"...)
	}
	if !atomic || i == 0 {
		h = append(h, nats.ExpectedLastSeqHdr+": "...)
		h = strconv.AppendUint(h, l.cfg.Base+b.unit+uint64(i), 10)
		h = append(h, "\r\n"...)
	}
	if atomic {
		h = append(h, batchIDHeader+": "...)
		h = l.appendBatchID(h)
		h = append(h, "\r\n"+batchSequenceHeader+": "...)
		h = strconv.AppendInt(h, int64(i+1), 10)
		h = append(h, "\r\n"...)
		if last {
			h = append(h, batchCommitHeader+": 1\r\n"...)
		}
	}
	h = append(h, headerEnd...)
	l.header = h
	return h
}

const (
	batchIDHeader       = "Nats-Batch-Id"
	batchSequenceHeader = "Nats-Batch-Sequence"
	batchCommitHeader   = "Nats-Batch-Commit"
	// batchHeaders is what they and what is expected of the stream take at most, in bytes,
	// the stream's name aside.
	batchHeaders = 200
)

func (l *Lane) appendBatchID(dst []byte) []byte {
	dst = append(dst, l.batches.id...)
	dst = append(dst, '-')
	return strconv.AppendUint(dst, l.batches.unit, 36)
}

// unitReply is where the reply to a message of a unit goes. Of an atomic batch only
// the last one has any. The state of a fast one travels in it: its id, an
// acknowledgement every so many messages, of which none is needed, to fail at a gap, the
// message's number, and what it does: 0 begins, 1 goes on, 2 is the last.
func (l *Lane) unitReply(i int, batch, last bool) []byte {
	b := &l.batches
	r := append(l.reply[:0], l.inbox...)
	switch {
	case batch && b.kind == BatchFast:
		r = l.appendBatchID(r)
		r = append(r, ".500.fail."...)
		r = strconv.AppendInt(r, int64(i+1), 10)
		op := byte('1')
		if i == 0 {
			op = '0'
		} else if last {
			op = '2'
		}
		r = append(r, '.', op)
		r = append(r, ".$FI"...)
	case last:
		r = strconv.AppendUint(r, b.unit+uint64(i), 36)
	default:
		return nil
	}
	l.reply = r
	return r
}

// EndTransaction says that all rows of the transaction were sent.
func (l *Lane) EndTransaction() {
	if l.batches.kind == BatchAtomic {
		l.sending.Lock()
		defer l.sending.Unlock()
		if l.batches.whole = len(l.batches.staged); l.batches.whole > 0 {
			l.letLinger()
		}
	}
}

// judge finds out what made a batch of a size fail at its n-th message.
func (b *batches) judge(err error, n, size int) {
	var ack *AckError
	errors.As(err, &ack)
	switch {
	case ack != nil && slices.Contains(batchRefusals, ack.ErrCode):
		b.refused = true
	case errors.Is(err, ErrBatch), ClassOf(err) == ClassRow, ack != nil && (ack.ErrCode == errBatchDuplicate || ack.ErrCode == errBatchIncomplete),
		ClassOf(err) == ClassChain && n > 1: // behind one that was taken for a duplicate
		b.suspect = min(size, maxAtomic) // of a larger one, what is before n is stored
	}
}

// dropBatchOf drops what has no reply of the batch that a message belongs to. The
// caller holds mu.
func (l *Lane) dropBatchOf(index uint64) {
	for _, x := range l.batches.sent {
		if index >= x.first && index < x.first+uint64(x.n) {
			l.onBatchFailure(x.first, 0, ErrBatch)
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
		l.onBatchFailure(b.unit, 0, ErrBatch)
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
	if bytes.HasPrefix(msg.Data, []byte(`{"type":"ack"`)) {
		// Of some of it. What proves the batch is its end.
		if s := l.ring.at(l.ring.low); s.state == sent {
			s.sentAt = l.ticks
		}
		return
	}
	if bytes.HasPrefix(msg.Data, []byte(`{"type":`)) && json.Unmarshal(msg.Data, &flow) == nil {
		err := fmt.Errorf("a message of a batch was lost: %s", excerpt(msg.Data))
		if flow.Type == "err" {
			_, err = parseAnyAck([]byte(`{"error":`+string(flow.Error)+`}`), l.cfg.Stream.cfg.Name)
		}
		l.onBatchFailure(first, flow.Sequence, err)
		return
	}
	ack, err := ParseAck(msg, l.cfg.Stream.cfg.Name)
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
			return x.first, l.batches.kind == BatchAtomic
		}
	}
	return 0, false
}

// onBatch takes a PubAck of a batch. The caller holds mu.
func (l *Lane) onBatch(first uint64, ack Ack) {
	b := &l.batches
	i := slices.IndexFunc(b.sent, func(x sentBatch) bool { return x.first == first })
	if i < 0 || ack.Duplicate || ack.Count != uint64(b.sent[i].n) || ack.Seq != l.cfg.Base+first+ack.Count {
		l.onBatchFailure(first, 0, fmt.Errorf("%w: the PubAck of the one at sequence %d counts %d to sequence %d", ErrBatch, l.cfg.Base+first+1, ack.Count, ack.Seq))
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
