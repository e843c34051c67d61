package publish

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// defaultAckTimeout is how long the lane waits for a PubAck before it calls the
// message's fate unknown and stops.
const defaultAckTimeout = 5 * time.Second

// ErrChain means that the stream's last sequence was not what the lane
// expected: somebody else writes to it, or a message of ours arrived late.
var ErrChain = errors.New("the stream is not where the lane left it")

// ErrDoubtful means that JetStream answered "duplicate" to a message that the
// read-back had not seen.
var ErrDoubtful = errors.New("JetStream calls the message a duplicate")

// errDrained means that the session that owns the lane is ending.
var errDrained = errors.New("lane is drained")

// ErrAckTimeout means that a message's fate is unknown.
var ErrAckTimeout = errors.New("no PubAck in time")

// LaneConfig says what a lane writes to, and from where on.
type LaneConfig struct {
	Conn     *nats.Conn
	Stream   *jetstream.Stream
	Subjects *Subjects
	Envelope *Envelope
	// Chained is set where the stream belongs to this relay alone: every message
	// then says after which sequence it is to be stored, Base for the first.
	Chained bool
	Base    uint64
	// Window and WindowBytes bound what is unacknowledged.
	Window      int
	WindowBytes int
	AckTimeout  time.Duration
	// Batching is what Resolve has said; empty is BatchSingle. OneByOne is how many
	// messages are sent by themselves first, see BatchFailed.
	Batching jetstream.Batching
	OneByOne int
	// Position is where the lane goes on from: the server's identity, and the
	// position of the newest message of the relay's own. Passed is E, the greatest
	// LSN under which anything can have been sent before.
	Position outbox.Position
	// OnStored is called after each PubAck with what it was for, in order, on the goroutine
	// that receives acknowledgements. It must not block, nor keep what it is given.
	OnStored func([]Stored)
	// IsGenuine, if set, is asked by Drain about a message with a row's id that JetStream
	// stored before: whether it has the row's payload.
	IsGenuine func(ctx context.Context, d Delivery, seq uint64, m jetstream.StoredMessage) (bool, error)
}

// Stored are so many messages of one commit that a PubAck was for.
type Stored struct {
	Commit int64 // its timestamp, in microseconds of Unix time; 0 for rows of the table
	N      int
}

// Lane is the one way into the stream for one session. What is sent through it
// is stored in the order of the calls to Send, or the lane stops: after the
// first failure it takes nothing more, and a message without a PubAck is
// forgotten, because only the WAL or the table may bring it again.
//
// A message stays in the lane until Settled; the lane never runs more than U
// messages past the oldest that is not.
//
// The window is the ring's messages without a PubAck. Only Send and SendPolled add one: they
// have sending all the time, and mu for the entry. Under mu one leaves it by its reply (the
// goroutine of the replies), by Deny (the NATS client's), or because its write failed (the
// sender, who has sending, too). Settled, which the marker calls, frees the entry. Sending is
// locked before mu, and no write to the network happens under mu.
type Lane struct {
	cfg   LaneConfig
	sub   *nats.Subscription
	inbox string
	// status tells of a lost connection: the fate of each message in flight is then unknown.
	status  chan nats.Status
	done    chan struct{}
	closing sync.Once
	wg      sync.WaitGroup

	// sending makes Send one at a time, from the place in the ring to the write
	// into the wire's buffer: that is what makes it a lane.
	sending sync.Mutex
	wire    wire
	linger  *time.Timer // flushes where the sender does not
	// lingering is set while linger runs: something waits for the sender's Flush.
	lingering bool
	stage     stage
	coder     coder
	unwritten uint64            // the index of the first message in the wire's buffer
	reply     []byte            // the reply subject of the message that is being sent
	types     map[string]string // event types, see intern
	last      outbox.Position   // of the newest row of the WAL
	// passed is the greatest LSN under which rows of the table were sent.
	passed atomic.Uint64

	acked []Stored // what OnStored is to be told; the acknowledgements' goroutine has it

	// mu guards what follows; it is never held across a write to the network.
	mu      sync.Mutex
	ring    *ring
	unit    unit // the sender may read it, too
	due     bool // the sender has left something staged because a unit was under way
	verdict verdict
	memory  time.Duration // how long JetStream remembers message ids
	ticks   uint32        // the lane's clock, see watch
	reserve uint64        // messages before the lane's first whose rows are unsettled too
	stored  []uint64      // acknowledged and not taken yet
	dropped int           // replies that were failures of no row's own
	first   bool          // the first message goes alone, see Fence
	highest uint64        // greatest sequence in a PubAck
	err     error         // the first failure
	failed  chan struct{}
	room    chan struct{} // a token: something left the window
	news    chan struct{} // a token: something was stored
}

// NewLane subscribes to the acknowledgements. Close it.
func NewLane(ctx context.Context, cfg LaneConfig) (*Lane, error) {
	if cfg.AckTimeout == 0 {
		cfg.AckTimeout = defaultAckTimeout
	}
	l := &Lane{
		cfg: cfg, inbox: cfg.Conn.NewInbox() + ".", done: make(chan struct{}),
		types: map[string]string{}, ring: &ring{}, highest: cfg.Base,
		failed: make(chan struct{}), room: make(chan struct{}, 1), news: make(chan struct{}, 1),
	}
	l.last = cfg.Position
	l.first = cfg.Chained && (cfg.Batching == "" || cfg.Batching == jetstream.BatchSingle)
	l.stage = stage{
		kind: cfg.Batching, window: cfg.Window, windowBytes: cfg.WindowBytes, oneByOne: cfg.OneByOne,
	}
	l.coder = coder{
		kind: cfg.Batching, inbox: l.inbox, stream: cfg.Stream.Name(), base: cfg.Base,
		id: strconv.FormatUint(rand.Uint64()>>24, 36),
	}
	l.Pass(cfg.Position.Passed)
	sub, err := cfg.Conn.Subscribe(l.inbox+">", l.onReply)
	if err != nil {
		return nil, fmt.Errorf("subscribe to acknowledgements: %w", err)
	}
	// The window bounds what can be pending; the client's own limits must not.
	_ = sub.SetPendingLimits(-1, -1)
	l.sub = sub
	l.status = cfg.Conn.StatusChanged(nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
	l.linger = time.AfterFunc(time.Hour, func() { _ = l.Flush() })
	l.wg.Go(l.watch)
	l.connect(ctx)
	return l, nil
}

// connect finds the way to write, for which the subscription has to be known to the
// server: what is written past the client overtakes what the client has not written
// yet.
func (l *Lane) connect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AckTimeout)
	defer cancel()
	l.wg.Go(func() {
		select {
		case <-l.failed: // the connection is lost
			cancel()
		case <-ctx.Done():
		}
	})
	nc := l.cfg.Conn
	l.wire = wire{nc: nc, sock: jetstream.PlainSocket(nc)}
	err := nats.ErrDisconnected
	if nc.IsConnected() {
		err = nc.FlushWithContext(ctx)
	}
	if err == nil && jetstream.PlainSocket(nc) != l.wire.sock {
		err = nats.ErrDisconnected // and connected again meanwhile
	}
	if err != nil {
		l.fail(fmt.Errorf("subscribe to acknowledgements: %w", err))
	}
}

// Close ends the lane. Replies that come later are not read. It may be called
// again.
func (l *Lane) Close() {
	l.fail(errDrained)
	l.closing.Do(func() {
		close(l.done)
		l.linger.Stop()
		_ = l.sub.Unsubscribe()
		l.cfg.Conn.RemoveStatusListener(l.status)
		l.wg.Wait()
	})
}

// Adapt takes over what an operator may change in a stream: the subjects that it
// listens on, the largest message that it takes, and its duplicate window.
func (l *Lane) Adapt(info *jetstream.StreamInfo) {
	l.sending.Lock()
	defer l.sending.Unlock()
	l.mu.Lock()
	l.memory = info.Config.Duplicates
	l.mu.Unlock()
	l.cfg.Subjects.Cover(info.Config.Subjects)
	l.cfg.Envelope.Limit(l.cfg.Conn.MaxPayload(), info.Config.MaxMsgSize)
}

// MostPayload is the longest payload that a message can have room for, in bytes.
func (l *Lane) MostPayload() int {
	l.sending.Lock()
	defer l.sending.Unlock()
	return l.cfg.Envelope.MostPayload()
}

// Reserve tells the lane how many messages lie between the oldest message that
// was stored before it and whose row is still unsettled, and its own first. They
// count towards U. Zero lifts it.
func (l *Lane) Reserve(n uint64) {
	l.mu.Lock()
	l.reserve = n
	l.mu.Unlock()
	signal(l.room)
}

func (l *Lane) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(err)
}

func (l *Lane) failLocked(err error) {
	if l.err == nil {
		l.err = err
		close(l.failed)
	}
}

// Failed is closed when the lane has stopped.
func (l *Lane) Failed() <-chan struct{} { return l.failed }

// Err is why the lane has stopped, nil while it goes on.
func (l *Lane) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Stored gets a token when something was acknowledged; see Take.
func (l *Lane) Stored() <-chan struct{} { return l.news }

// Take appends up to limit acknowledged deliveries to dst, in the order of their
// acknowledgement. The Index of each is to be given to Settled once.
func (l *Lane) Take(dst []Delivery, limit int) []Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(limit, len(l.stored))
	dst = slices.Grow(dst, n)
	for _, i := range l.stored[:n] {
		dst = append(dst, l.ring.at(i).delivery)
	}
	rest := copy(l.stored, l.stored[n:])
	l.stored = l.stored[:rest]
	if rest > 0 {
		signal(l.news)
	}
	return dst
}

// Unsettled calls each with every row that is in the lane's hands.
func (l *Lane) Unsettled(each func(outbox.Ref)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := l.ring.tail; i < l.ring.head; i++ {
		if s := l.ring.at(i); s.state != settled {
			each(s.delivery.Ref)
		}
	}
}

// Settled takes messages out of the lane's hands.
func (l *Lane) Settled(indexes []uint64) {
	l.mu.Lock()
	for _, i := range indexes {
		l.ring.settle(i)
	}
	l.mu.Unlock()
	signal(l.room)
}

// Counts are what the lane holds now.
type Counts struct {
	Inflight, InflightBytes int
	Unsettled               uint64
	// Forgotten counts messages that were sent and have no PubAck although the lane has stopped.
	Forgotten int
}

// Counts reads the lane's gauges.
func (l *Lane) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := Counts{l.ring.inflight, l.ring.bytes, l.ring.head - l.ring.tail, l.dropped}
	if l.err != nil {
		c.Forgotten += l.ring.inflight
	}
	return c
}

// LastSeq is the greatest sequence that a PubAck named, Base before the first.
func (l *Lane) LastSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.highest
}

// Progress reports whether anything was stored.
func (l *Lane) Progress() bool { return l.LastSeq() > l.cfg.Base }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
