package publish

import (
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

const (
	// maxAtomic is the server's limit on the messages of an atomic batch.
	maxAtomic = 1000
	// The server has no limit for a fast batch. A chunk of it goes as soon as it is of such
	// a size. What gathers while a batch is under way is in the relay's memory: more of it
	// would make nothing faster.
	chunkMessages = 256
	chunkBytes    = 192 << 10
	maxStage      = 1000
	maxStageBytes = 2 << 20
	// atomicLeast is how many messages of single rows have to wait for an atomic batch to
	// be worth it: a server without replicas makes a store for each, which takes it
	// milliseconds.
	atomicLeast = 32
)

// stage is where messages gather for the next unit, see [unit]. The sender owns it.
type stage struct {
	kind jetstream.Batching
	// window and windowBytes are the publisher's.
	window, windowBytes int
	oneByOne            int // so many messages are still to be sent one by one

	messages []staged
	arena    []byte     // their headers and bodies
	first    uint64     // the index of the first one
	whole    int        // the first so many are all of their transactions
	commit   outbox.LSN // of the last one, 0 where the table brought it
}

// staged is a message that waits for its unit.
type staged struct {
	subject      string
	header, body int  // where they end; a header begins where the body before it ends
	alone        bool // a batch's headers would make it too large
	joined       bool // it is of the transaction of the one before
}

// used reports whether the publisher stages what it sends.
func (g *stage) used() bool { return g.kind == jetstream.BatchFast || g.kind == jetstream.BatchAtomic }

// add keeps a message. The caller has found a place for it in the ring.
func (g *stage) add(subject string, index uint64, commit outbox.LSN, header, body []byte, alone bool) {
	if len(g.messages) == 0 {
		g.first = index
	}
	g.arena = append(g.arena, header...)
	s := staged{subject: subject, header: len(g.arena), alone: alone}
	s.joined = len(g.messages) > 0 && commit != 0 && commit == g.commit
	g.commit = commit
	g.arena = append(g.arena, body...)
	s.body = len(g.arena)
	g.messages = append(g.messages, s)
}

// drop takes out the first n messages, which were written.
func (g *stage) drop(n int) {
	start := g.messages[n-1].body
	rest := copy(g.arena, g.arena[start:])
	g.arena = g.arena[:rest]
	rest = copy(g.messages, g.messages[n:])
	clear(g.messages[rest:])
	g.messages = g.messages[:rest]
	for i := range g.messages {
		g.messages[i].header -= start
		g.messages[i].body -= start
	}
	g.first += uint64(n)
	g.whole = max(0, g.whole-n)
	g.oneByOne -= min(g.oneByOne, n)
}

func (g *stage) clear() { g.messages, g.arena, g.whole = nil, nil, 0 }

// mostInUnit is how many messages and bytes a unit has at most.
func (g *stage) mostInUnit() (messages, bytes int) {
	messages, bytes = max(1, g.window/2), g.windowBytes/2
	if g.kind == jetstream.BatchFast {
		return max(messages, g.window-maxStage), bytes
	}
	return min(messages, maxAtomic), bytes
}

// mostStaged is how many may be staged while a unit is under way: all of the next atomic
// batch, which is written as a whole.
func (g *stage) mostStaged() (messages, bytes int) {
	messages, bytes = g.mostInUnit()
	if g.kind == jetstream.BatchFast {
		messages, bytes = min(messages, maxStage), min(bytes, maxStageBytes)
	}
	if g.oneByOne > 0 {
		messages = min(messages, 64)
	}
	return messages, bytes
}

// isFull reports whether what is staged has to go before more is.
func (g *stage) isFull(underWay bool) bool {
	messages, bytes := g.mostStaged()
	return len(g.messages) >= messages || len(g.arena) > bytes || !underWay && g.isChunk()
}

// isChunk reports whether enough is staged for it to be written as a chunk of a fast batch.
func (g *stage) isChunk() bool {
	return g.kind == jetstream.BatchFast && g.oneByOne == 0 && len(g.messages) > 1 &&
		(len(g.messages) >= chunkMessages || len(g.arena) >= chunkBytes)
}

// ready is how many of the messages may go now. Of an atomic batch these are whole
// transactions, unless one alone fills all that is in flight and more of it is to come.
func (g *stage) ready(more bool, inflight int) int {
	if g.kind == jetstream.BatchAtomic && !(more && g.whole == 0 && inflight == len(g.messages)) {
		return g.whole
	}
	return len(g.messages)
}

// next is how many of the first n messages go together, and whether the batch that they
// are of goes on after them: then one message stays, to be the last one.
func (g *stage) next(n int, goesOn bool) (int, bool) {
	if g.oneByOne > 0 {
		return 1, false
	}
	if g.kind == jetstream.BatchAtomic && n > 1 && n < atomicLeast && !g.messages[1].joined {
		return 1, false
	}
	for i, s := range g.messages[:n] {
		if s.alone {
			return max(i, 1), false
		}
	}
	if goesOn {
		return n - 1, true
	}
	return n, false
}
