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

// defaultAckTimeout is how long the publisher waits for a PubAck before it calls the
// message's fate unknown and stops.
const defaultAckTimeout = 5 * time.Second

// ErrChain means that the stream's last sequence was not what the publisher
// expected: somebody else writes to it, or a message of ours arrived late.
var ErrChain = errors.New("the stream is not where the publisher left it")

// ErrDoubtful means that JetStream answered "duplicate" to a message that the
// recovery scan had not seen.
var ErrDoubtful = errors.New("JetStream calls the message a duplicate")

// errDrained means that the session that owns the publisher is ending.
var errDrained = errors.New("publisher is drained")

// ErrAckTimeout means that a message's fate is unknown.
var ErrAckTimeout = errors.New("no PubAck in time")

// PublisherConfig says what a publisher writes to, and from where on.
type PublisherConfig struct {
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
	// Position is where the publisher goes on from: the server's identity, and the
	// position of the relay's newest message. Passed is the recovery LSN: no row with a
	// greater commit LSN can have been sent before.
	Position outbox.Position
	// OnStored is called after each PubAck with what it was for, in order, on the goroutine
	// that receives acknowledgements. It must not block, nor keep what it is given.
	OnStored func([]Stored)
	// Held, if set, is asked before anything is written. Its error is the publisher's failure.
	Held func() error
	// Check, if set, is asked about each row that could be sent. Its error is a *outbox.RowError.
	Check func(*outbox.Event) error
	// Trace, if set, is called before each row is sent. It returns nil for a row that is not traced.
	Trace func(ev *outbox.Event, subject string) Trace
	// IsGenuine, if set, is asked by Drain about a message with a row's id that JetStream
	// stored before: whether it is what was published for the row.
	IsGenuine func(ctx context.Context, d Delivery, m jetstream.StoredMessage) (bool, error)
}

// Stored are so many messages of one commit that a PubAck was for.
type Stored struct {
	Commit int64 // its timestamp, in microseconds of Unix time; 0 for rows of the table
	N      int
	Trace  Trace // of the message where it is traced: N is 1 then
}

// Trace follows a row that is traced.
type Trace interface {
	// Stored is called when the message's own PubAck has come, before Take returns it. It must not block.
	Stored(sequence uint64)
}

// Publisher is the one way into the stream for one session. What is sent through it
// is stored in the order of the calls to Send, or the publisher stops: after the
// first failure it takes nothing more, and a message without a PubAck is
// forgotten, because only the WAL or the table may bring it again.
//
// A message stays in the publisher until Release; the publisher never runs more than U
// messages past the oldest one that was not released.
//
// The window is the ring's messages without a PubAck. Only Send and SendPolled add one: they
// have sending all the time, and mu for the entry. A message leaves the window under mu:
//
//   - by its reply or its batch's, on the goroutine of the replies
//   - by Deny, on the NATS client's goroutine
//   - once the publisher has stopped, because it was never written or its batch was cut: on the
//     goroutine that has sending, which is a sender, the linger timer, or Drain
//
// A message whose write failed stays in the window. Release, which the marker calls, frees the
// entry. Sending is locked before mu, and no write to the network happens under mu. Send has
// sending while it waits for room, so Drain stops the publisher before it locks sending.
// The ring's head may be read under sending alone: it grows under both locks.
type Publisher struct {
	cfg   PublisherConfig
	sub   *nats.Subscription
	inbox string
	// status tells of a lost connection: the fate of each message in flight is then unknown.
	status  chan nats.Status
	done    chan struct{}
	closing sync.Once
	wg      sync.WaitGroup

	// sending makes Send one at a time, from the place in the ring to the write
	// into the wire's buffer. That keeps the messages in order.
	sending sync.Mutex
	wire    wire
	linger  *time.Timer // flushes where the sender does not
	// lingering is set while linger runs: something waits for the sender's Flush.
	lingering bool
	stage     stage
	coder     coder
	unwritten uint64 // the index of the first message in the wire's buffer
	reply     []byte // the reply subject of the message that is being sent
	// reconnects is how often the client had reconnected before the publisher's first message.
	reconnects uint64
	types      map[string]string // event types, see intern
	last       outbox.Position   // of the newest row of the WAL
	// passed is the greatest LSN under which rows of the table were sent.
	passed atomic.Uint64

	acked []Stored // what OnStored is to be told; the acknowledgements' goroutine has it

	// mu guards what follows; it is never held across a write to the network.
	mu      sync.Mutex
	ring    *ring
	unit    unit // all but its state may be read under sending, too
	due     bool // the sender has left something staged because a unit was under way
	verdict verdict
	memory  time.Duration // how long JetStream remembers message ids
	ticks   uint32        // the publisher's clock, see watch
	reserve uint64        // messages before the publisher's first whose rows are unmarked, too
	stored  []uint64      // acknowledged and not taken yet
	dropped int           // replies that were failures of no row's own
	first   bool          // the first message goes alone, see Fence
	highest uint64        // greatest sequence in a PubAck
	err     error         // the first failure
	failed  chan struct{}
	room    chan struct{} // a token: something left the window
	news    chan struct{} // a token: something was stored
}

// NewPublisher subscribes to the acknowledgements. Close it.
func NewPublisher(ctx context.Context, cfg PublisherConfig) (*Publisher, error) {
	if cfg.AckTimeout == 0 {
		cfg.AckTimeout = defaultAckTimeout
	}
	l := &Publisher{
		cfg: cfg, inbox: cfg.Conn.NewInbox() + ".", done: make(chan struct{}),
		reconnects: cfg.Conn.Stats().Reconnects,
		types:      map[string]string{}, ring: &ring{}, highest: cfg.Base,
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
func (p *Publisher) connect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.AckTimeout)
	defer cancel()
	p.wg.Go(func() {
		select {
		case <-p.failed: // the connection is lost
			cancel()
		case <-ctx.Done():
		}
	})
	nc := p.cfg.Conn
	p.wire = wire{nc: nc, sock: jetstream.PlainSocket(nc), held: p.cfg.Held}
	err := nats.ErrDisconnected
	if nc.IsConnected() {
		err = nc.FlushWithContext(ctx)
	}
	if err == nil && jetstream.PlainSocket(nc) != p.wire.sock {
		err = nats.ErrDisconnected // and connected again meanwhile
	}
	if err != nil {
		p.fail(fmt.Errorf("subscribe to acknowledgements: %w", err))
	}
}

// Close ends the publisher. Replies that come later are not read. It may be called
// again.
func (p *Publisher) Close() {
	p.fail(errDrained)
	p.closing.Do(func() {
		close(p.done)
		p.linger.Stop()
		_ = p.sub.Unsubscribe()
		p.cfg.Conn.RemoveStatusListener(p.status)
		p.wg.Wait()
	})
}

// Adapt takes over what an operator may change in a stream: the subjects that it
// listens on, the largest message that it takes, and its duplicate window.
func (p *Publisher) Adapt(info *jetstream.StreamInfo) {
	p.sending.Lock()
	defer p.sending.Unlock()
	p.mu.Lock()
	p.memory = info.Config.Duplicates
	p.mu.Unlock()
	p.cfg.Subjects.Cover(info.Config.Subjects)
	p.cfg.Envelope.Limit(p.cfg.Conn.MaxPayload(), info.Config.MaxMsgSize)
}

// MostPayload is the longest payload that a message can have room for, in bytes.
func (p *Publisher) MostPayload() int {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.cfg.Envelope.MostPayload()
}

// Reserve tells the publisher how many messages lie between the oldest message that
// was stored before it and whose row is still unmarked, and its own first. They
// count towards U. Zero lifts it.
func (p *Publisher) Reserve(n uint64) {
	p.mu.Lock()
	p.reserve = n
	p.mu.Unlock()
	signal(p.room)
}

func (p *Publisher) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failLocked(err)
}

func (p *Publisher) failLocked(err error) {
	if p.err == nil {
		p.err = err
		close(p.failed)
	}
}

// Failed is closed when the publisher has stopped.
func (p *Publisher) Failed() <-chan struct{} { return p.failed }

// Err is why the publisher has stopped, nil while it goes on.
func (p *Publisher) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Stored gets a token when something was acknowledged; see Take.
func (p *Publisher) Stored() <-chan struct{} { return p.news }

// Take appends up to limit acknowledged deliveries to dst, in the order of their
// acknowledgement. The Index of each is to be given to Release once.
func (p *Publisher) Take(dst []Delivery, limit int) []Delivery {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(limit, len(p.stored))
	dst = slices.Grow(dst, n)
	for _, i := range p.stored[:n] {
		dst = append(dst, p.ring.at(i).delivery)
	}
	rest := copy(p.stored, p.stored[n:])
	p.stored = p.stored[:rest]
	if rest > 0 {
		signal(p.news)
	}
	return dst
}

// Unreleased calls each with every row that the publisher has, but for those that are published again.
func (p *Publisher) Unreleased(each func(outbox.Ref)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := p.ring.tail; i < p.ring.head; i++ {
		if s := p.ring.at(i); s.state != released && s.delivery.Replay == 0 {
			each(s.delivery.Ref)
		}
	}
}

// Release has the publisher forget messages.
func (p *Publisher) Release(indexes []uint64) {
	p.mu.Lock()
	for _, i := range indexes {
		p.ring.release(i)
	}
	p.mu.Unlock()
	signal(p.room)
}

// HasSpare reports whether rows can be published again without others waiting for room: a quarter of the
// window is in flight at most, and few rows wait for their marks.
func (p *Publisher) HasSpare() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ring.inflight <= p.cfg.Window/4 && p.beyond() <= jetstream.U/4
}

// Counts are what the publisher holds now.
type Counts struct {
	Inflight, InflightBytes int
	Unreleased              uint64
	// Forgotten counts messages that were sent and have no PubAck although the publisher has stopped.
	Forgotten int
}

// Counts reads the publisher's gauges.
func (p *Publisher) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := Counts{p.ring.inflight, p.ring.bytes, p.ring.head - p.ring.tail, p.dropped}
	if p.err != nil {
		c.Forgotten += p.ring.inflight
	}
	return c
}

// LastSeq is the greatest sequence that a PubAck named, Base before the first.
func (p *Publisher) LastSeq() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.highest
}

// Settled is a sequence up to which every message was released, Base before the first. ok is false as long as
// messages that were stored before the publisher are not, see Reserve.
func (p *Publisher) Settled() (seq uint64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ring.tail == p.ring.head {
		return p.highest, p.reserve == 0
	}
	return max(p.cfg.Base, p.ring.settled), p.reserve == 0
}

// Progress reports whether anything was stored.
func (p *Publisher) Progress() bool { return p.LastSeq() > p.cfg.Base }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
