package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"go.uber.org/zap"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// statusInterval is the longest silence towards the server.
const statusInterval = time.Second

// mostBesidePayload is how many bytes a message can have beside a payload: an id, thirteen
// attributes, and their places.
const mostBesidePayload = 4 << 20

// leaveTimeout is how long a session that ends well waits for the server.
const leaveTimeout = time.Second

// Config says what to stream.
type Config struct {
	Server      pg.Config
	Slot        string
	Publication string
	Tables      []*outbox.Table
	// ByOID is that of [decode.New].
	ByOID map[uint32]*outbox.Table
	Log   *zap.Logger
	// HeldBack, if set, is called, about once a second and on the reader's goroutine, while the
	// server sends nothing because of synchronized_standby_slots, with its own words. When the server sends
	// WAL after that, or for the first time, it is called with "". It must not block.
	HeldBack func(why string)
}

// Handler receives what the WAL says, in commit order, on one goroutine. An
// error of its ends the session.
type Handler interface {
	// Row is called for every INSERT into an outbox table. The event is valid
	// until Row returns. A row that is not settled when Row returns is added to
	// the transaction (Txn.Add) and settled later.
	Row(ctx context.Context, ev *outbox.Event, txn *Txn) error
	// Described is called where the server describes an outbox table: before the first row, and when the
	// table or its publication may have changed. altered: otherwise than before.
	Described(ctx context.Context, altered bool) error
	// Commit is called after the last row of a transaction.
	Commit()
	// Idle is called when the server has nothing more to send for now.
	Idle(ctx context.Context) error
	// Dry is called before the reader waits, when everything that has arrived is handed
	// over, unless the last read was as large as one can be: then more is likely to be
	// there. It comes often, also between two rows of a transaction.
	Dry()
}

// ErrPublicationSkipped means that the server left rows out because it could
// not load the publication (18 says so in a notice and goes on).
var ErrPublicationSkipped = errors.New("publication was skipped by the server")

// ErrBeforePublication means that the slot stands where the publication did not
// exist: decoding looks it up as of each change.
var ErrBeforePublication = errors.New("the slot is older than the publication")

// ErrUndecodable means that the WAL holds a message that cannot be read, or a row that
// makes no event, such as one of a time before a mapped column was added.
var ErrUndecodable = errors.New("decode WAL")

// Unsendable means that the walsender has failed at what it was about to send: a value that it cannot
// convert, whose text is longer than 1 GB, or that nothing can be made of (classes 22, 54 and XX). As
// a rule it fails there each time.
type Unsendable struct {
	// After is the end of the last transaction that the session has received, 0 without one.
	After outbox.LSN
	Err   error
}

func (e *Unsendable) Error() string { return e.Err.Error() }
func (e *Unsendable) Unwrap() error { return e.Err }

// Session is one START_REPLICATION. From Open to Close the standby status goes
// out every second, read or not.
type Session struct {
	cfg     Config
	conn    *pgconn.PgConn
	source  *gatherer // below conn
	abridge *abridger // above it
	tracker *Tracker
	system  System
	wake    chan struct{} // asks the ticker for a status now
	closed  chan struct{}
	broken  chan struct{} // closed when a status could not be sent
	ticking sync.WaitGroup
	closing sync.Once

	// The reader's own: the transaction that is being read, when it was committed, in
	// microseconds of the server's clock, and where the last one has ended.
	txn       *Txn
	committed int64
	ended     outbox.LSN
	// held: the server has sent no WAL since the last call of cfg.HeldBack.
	held bool

	// mu guards what follows: up to where everything was received, and who waits
	// for how far.
	mu       sync.Mutex
	received outbox.LSN
	news     chan struct{} // of those who wait, nil without one: closed when received has grown
}

// System identifies the WAL that a session reads.
type System struct {
	ID       string
	Timeline uint32
	Database string
	// History says, for every older timeline, up to where it is part of this WAL.
	History map[uint32]outbox.LSN
}

// Open connects and has START_REPLICATION accepted at 0/0, which means: go on
// where the slot stands. It returns ErrSlotActive where another relay streams,
// ErrNoSlot where there is no slot.
func Open(ctx context.Context, cfg Config) (*Session, error) {
	var source *gatherer
	var abridge *abridger
	conn, err := connect(ctx, cfg.Server, func(c *pgconn.Config) {
		c.MaxProtocolMessageBodyLen = plainMessage // until Run
		c.DialFunc = dialGathering(c.DialFunc, &source)
		c.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
			abridge = &abridger{r: r}
			return pgproto3.NewFrontend(abridge, w)
		}
	})
	if err != nil {
		return nil, err
	}
	s := &Session{
		cfg: cfg, conn: conn, source: source, abridge: abridge, held: cfg.HeldBack != nil,
		wake: make(chan struct{}, 1), closed: make(chan struct{}), broken: make(chan struct{}),
	}
	if err := s.start(ctx); err != nil {
		closeConn(conn)
		return nil, err
	}
	s.ticking.Go(s.tick)
	return s, nil
}

func (s *Session) start(ctx context.Context) error {
	var err error
	if s.system, err = identify(ctx, s.conn); err != nil {
		return err
	}
	slot, err := readSlot(ctx, s.conn, s.cfg.Slot)
	if err != nil {
		return err
	}
	s.tracker = NewTracker(slot.ConfirmedFlush)
	s.received = slot.ConfirmedFlush // the server may have nothing to say for long
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	name := outbox.QuoteIdent(s.cfg.Slot)
	err = pglogrepl.StartReplication(ctx, s.conn, name, 0, pglogrepl.StartReplicationOptions{
		Mode: pglogrepl.LogicalReplication,
		PluginArgs: []string{
			"proto_version '1'",
			"publication_names " + pg.QuoteLiteral(outbox.QuoteIdent(s.cfg.Publication)),
		},
	})
	switch {
	case err == nil:
		return nil
	case pg.Code(err) == pgerrcode.ObjectInUse:
		return fmt.Errorf("start replication: %w: %w", ErrSlotActive, err)
	case pg.Code(err) == pgerrcode.ObjectNotInPrerequisiteState: // it was invalidated since it was read
		return fmt.Errorf("start replication: %w: %w", ErrSlotLost, err)
	}
	return fmt.Errorf("start replication: %w", err)
}

// PID is the walsender's process id.
func (s *Session) PID() uint32 { return s.conn.PID() }

// System identifies the server that the session reads from.
func (s *Session) System() System { return s.system }

// Tracker knows what the session may confirm.
func (s *Session) Tracker() *Tracker { return s.tracker }

// Run reads until ctx is done (nil), the handler fails (its error, unwrapped),
// or the connection does. After it, the session still ticks.
//
// mostPayload is the longest payload that is kept, in bytes. What is longer, and what is
// too long for a header, is read through and left out of the event (outbox.Event.Omitted).
func (s *Session) Run(ctx context.Context, h Handler, mostPayload int) error {
	stop := context.AfterFunc(ctx, func() {
		// A deadline in the past wakes the reader.
		_ = s.conn.Conn().SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()
	decoder := decode.New(s.cfg.Tables, s.cfg.ByOID)
	s.source.dry = h.Dry
	s.abridge.most = mostPayload
	s.abridge.shorten = func(dst []byte, r io.Reader, n int) ([]byte, error) {
		return decoder.Abridge(dst, r, n, mostPayload)
	}
	s.conn.Frontend().SetMaxBodyLen(mostPayload + mostBesidePayload)
	for {
		msg, err := s.conn.Frontend().Receive()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("read from walsender: %w", err)
		}
		if err := s.handle(ctx, decoder, h, msg); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

func (s *Session) handle(
	ctx context.Context, d *decode.Decoder, h Handler, msg pgproto3.BackendMessage,
) error {
	switch msg := msg.(type) {
	case *pgproto3.CopyData:
		return s.copyData(ctx, d, h, msg.Data)
	case *pgproto3.NoticeResponse:
		return s.notice(msg)
	case *pgproto3.ErrorResponse:
		err := fmt.Errorf("walsender: %w", pgconn.ErrorResponseToPgError(msg))
		switch {
		case pg.Code(err) == pgerrcode.UndefinedObject:
			return fmt.Errorf("%w: %w", ErrBeforePublication, err)
		case pg.InClass(err, pg.DataException, pg.ProgramLimitExceeded, pg.InternalError):
			return &Unsendable{After: s.ended, Err: err}
		}
		return err
	case *pgproto3.ParameterStatus:
		return nil
	default:
		return fmt.Errorf("walsender ended the stream (%T)", msg)
	}
}

func (s *Session) notice(n *pgproto3.NoticeResponse) error {
	// The message may be translated, the routine is not.
	if n.Routine == "LoadPublications" || strings.Contains(n.Message, "skipped loading publication") {
		return hint.Errorf("create the publication with `walpost migrate up`, "+
			"and never drop it while the slot lives; rows between are "+
			"in the table, not in the stream", "%w: %s", ErrPublicationSkipped, n.Message)
	}
	if n.Routine == "StandbySlotsHaveCaughtup" {
		s.held = true
		s.cfg.HeldBack(n.Message)
		return nil
	}
	s.cfg.Log.Warn("notice from walsender",
		zap.String("severity", n.Severity), zap.String("code", n.Code), zap.String("message", n.Message))
	return nil
}

const (
	xlogDataHeader  = 1 + 8 + 8 + 8 // 'w', start, end, time
	keepaliveLength = 1 + 8 + 8 + 1 // 'k', WAL end, time, reply requested
)

func (s *Session) copyData(ctx context.Context, d *decode.Decoder, h Handler, data []byte) error {
	switch {
	case len(data) >= xlogDataHeader && data[0] == 'w':
		return s.walData(ctx, d, h, int64(binary.BigEndian.Uint64(data[17:])), data[xlogDataHeader:])
	case len(data) == keepaliveLength && data[0] == 'k':
		return s.keepalive(ctx, h, outbox.LSN(binary.BigEndian.Uint64(data[1:])), data[17] != 0)
	}
	return fmt.Errorf("read from walsender: unknown replication message of %d bytes", len(data))
}

func (s *Session) keepalive(ctx context.Context, h Handler, end outbox.LSN, reply bool) error {
	if reply {
		s.Flush()
	}
	if end > s.received { // only this goroutine changes it
		s.goesOn()
	}
	s.source.late(0) // it has sent all it had, or a second has passed
	// In the middle of a transaction its LSN is that transaction's own.
	if s.txn != nil {
		return nil
	}
	s.tracker.Idle(end)
	err := h.Idle(ctx)
	s.advance(end)
	return err
}

// goesOn notes that the server sends WAL.
func (s *Session) goesOn() {
	if s.held {
		s.held = false
		s.cfg.HeldBack("")
	}
}

// serverEpoch is 2000-01-01, in microseconds of Unix time.
const serverEpoch = 946_684_800_000_000

// walData takes a message that left the server at a time of its clock.
func (s *Session) walData(ctx context.Context, d *decode.Decoder, h Handler, left int64, data []byte) error {
	s.goesOn()
	m, err := d.Decode(data)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	switch m.Kind {
	case decode.Begin:
		s.txn, s.committed = s.tracker.Begin(), m.CommitTime.UnixMicro()-serverEpoch
	case decode.Row:
		s.source.late(time.Duration(left-s.committed) * time.Microsecond)
		return h.Row(ctx, m.Event, s.txn)
	case decode.Described:
		return h.Described(ctx, m.Altered)
	case decode.Commit:
		h.Commit()
		s.txn.Commit(m.End)
		s.txn, s.ended = nil, m.End
		s.advance(m.End)
	}
	return nil
}

// advance notes that everything committed up to an LSN was received and handed
// over.
func (s *Session) advance(to outbox.LSN) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received = max(s.received, to)
	if s.news != nil {
		close(s.news)
		s.news = nil
	}
}

// AwaitReceived waits until every row committed up to an LSN has been received
// and given to the handler. The server tells of it at once where it has sent all
// it has, and has flushed that far.
func (s *Session) AwaitReceived(ctx context.Context, lsn outbox.LSN) error {
	for {
		s.mu.Lock()
		if s.received >= lsn {
			s.mu.Unlock()
			return nil
		}
		if s.news == nil {
			s.news = make(chan struct{})
		}
		news := s.news
		s.mu.Unlock()
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Broken reports whether the connection has failed under the ticker.
func (s *Session) Broken() bool {
	select {
	case <-s.broken:
		return true
	default:
		return false
	}
}

// Flush asks for a standby status now.
func (s *Session) Flush() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// tick sends the standby status until Close. It is the only writer.
func (s *Session) tick() {
	t := time.NewTicker(statusInterval)
	defer t.Stop()
	for {
		if err := s.sendStatus(); err != nil {
			// A reader sees the broken connection by itself.
			close(s.broken)
			_ = s.conn.Conn().Close()
			return
		}
		select {
		case <-s.closed:
			return
		case <-s.wake:
		case <-t.C:
		}
	}
}

func (s *Session) sendStatus() error {
	lsn := pglogrepl.LSN(s.tracker.Confirmed())
	_ = s.conn.Conn().SetWriteDeadline(time.Now().Add(walSenderTimeout))
	// All three are set: pglogrepl replaces a zero Flush or Apply by Write.
	return pglogrepl.SendStandbyStatusUpdate(context.Background(), s.conn, pglogrepl.StandbyStatusUpdate{
		WALWritePosition: lsn, WALFlushPosition: lsn, WALApplyPosition: lsn,
	})
}

// Close ends the session at once. Where confirm is set it first tells the
// server what is settled since the last tick. It may be called again.
func (s *Session) Close(confirm bool) {
	s.closing.Do(func() {
		close(s.closed)
		if !confirm {
			_ = s.conn.Conn().Close()
		}
		s.ticking.Wait()
		if confirm && s.sendStatus() == nil {
			s.leave()
		}
		closeConn(s.conn)
	})
}

// leave waits, for a moment, until the walsender has read the last status and
// gone. A socket that is closed while there is more to read resets the
// connection, and a walsender with more to send then ends without reading.
func (s *Session) leave() {
	_ = s.conn.Conn().SetDeadline(time.Now().Add(leaveTimeout))
	s.conn.Frontend().Send(&pgproto3.Terminate{})
	if s.conn.Frontend().Flush() == nil {
		_, _ = io.Copy(io.Discard, s.conn.Conn())
	}
}

// closeConn does not wait for the server: a walsender that is shutting down
// would answer only after us.
func closeConn(conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	_ = conn.Close(ctx)
}
