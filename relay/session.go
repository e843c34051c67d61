package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// drainTimeout is how long an ending session waits for the PubAcks and marks of
// what it has sent, finishTimeout for the last marks included. What is not there by then is
// found by the next recovery scan.
const drainTimeout = 10 * time.Second

// errSynchronous: the server counts the relay among its synchronous standbys.
var errSynchronous = errors.New("the server waits for the relay as for a synchronous standby")

// errReconnected: part of the answer may be the next connection's, which proves nothing.
var errReconnected = errors.New(
	"ask where the stream ends: the connection to NATS was lost and made again meanwhile")

// session is one publisher and what flows into it. The leader's goroutine starts it, waits in run for its
// end, and stops it; it sets the fields in the order in which they stand here. Beside it run
//
//   - serverWatch, as long as replication runs
//   - watchFacts, which looks at the tables, the publication and the stream
//   - the marker
//   - work: it heals, and then it is the reader of the WAL, with the poller beside it, or the poller
//   - the replayer, beside work
//
// Who owns what inside the marker, the poller, the WAL handler and the holds is said there.
type session struct {
	*reporter
	*servers
	past    *history
	current *atomic.Pointer[session]
	db      *table.DB
	altered chan struct{} // asks watchFacts for a look now

	wal       *stream.Session // nil where none is read
	recovered *recoveryState
	noter     *noter
	holds     *fallback.Holds
	moved     *fallback.Moved
	publisher *publish.Publisher
	marker    *marker
	poller    *fallback.Poller

	// What serverWatch and the publisher's callbacks share with the others.
	watchedRecoveryLSN atomic.Uint64
	away               atomic.Bool  // JetStream
	stored             atomic.Int64 // PubAcks
	transformed        bool         // the stream had a subject transform at the begin
	left               sync.Map     // the outboxes that are left to the table: see leave
	// other is the publisher of a replay into another stream.
	other atomic.Pointer[publish.Publisher]
}

func (l *leader) newSession(db *table.DB) *session {
	return &session{
		reporter: l.reporter, servers: l.servers, past: l.past, current: l.current, db: db,
		altered: make(chan struct{}, 1),
	}
}

// streamed is a session that reads the WAL. It ends when something fails or ctx is done. held ends with the
// lock's connection, and ctx ends with held.
func (s *session) streamed(ctx, held context.Context) (err error) {
	s.status.runsAs(modeStream, &s.stored)
	s.status.do("start replication")
	if s.wal, err = s.open(ctx); err != nil {
		return err
	}
	defer s.wal.Close(false) // nothing to confirm where it was not closed before
	// At once, whatever the session is doing, so that a server that shuts down is
	// not held up.
	defer context.AfterFunc(held, func() { s.wal.Close(false) })()
	s.lookAtPublication(ctx)
	s.watchedRecoveryLSN.Store(math.MaxUint64) // until it is known
	ctx, stop := context.WithCancelCause(ctx)
	defer func() {
		if errors.Is(err, context.Canceled) {
			err = context.Cause(ctx)
		}
	}()
	watch := &serverWatch{reporter: s.reporter, cfg: s.cfg, db: s.db, wal: s.wal, keeps: s.recovers}
	var watching sync.WaitGroup
	watching.Go(func() { stop(watch.run(ctx)) })
	defer func() { stop(nil); watching.Wait() }()
	info, err := s.awaitStream(ctx, s.fence)
	if err != nil {
		return err
	}
	s.metrics.setMode(modeStream)
	if err := s.begin(ctx, s.wal.System(), info); err != nil {
		return err
	}
	defer s.close()
	if s.mayLackRecords(s.wal.System()) {
		return &unanswered{s.wal.System()}
	}
	if err := s.leaveOut(ctx); err != nil {
		return err
	}
	s.watchedRecoveryLSN.Store(uint64(s.recovered.recoveryLSN))
	return s.run(ctx, held, func(ctx context.Context) error { return s.readWAL(ctx, info) })
}

// recovers reports whether rows flow, and the WAL may still bring what was sent before.
func (s *session) recovers() bool {
	return !s.away.Load() && uint64(s.wal.Tracker().Confirmed()) < s.watchedRecoveryLSN.Load()
}

// readWAL is the work of a session that streams.
func (s *session) readWAL(ctx context.Context, info *jetstream.StreamInfo) error {
	if err := s.heal(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := s.expectMoved(ctx); err != nil {
		return err
	}
	handler := &walHandler{
		reporter: s.reporter, cfg: s.cfg, db: s.db, publisher: s.publisher,
		marker: s.marker, holds: s.holds, poller: s.poller, recovered: s.recovered,
		moved: s.moved, takenTo: map[*outbox.Table]int64{},
		altered: s.altered, leaves: s.leaves, checkPublished: s.readPublished,
	}
	s.poller.Beside(pollerWAL{s.wal, handler})
	s.watchedRecoveryLSN.Store(uint64(s.recovered.recoveryLSN))
	s.log.Info("streaming", zap.String("slot", s.cfg.Slot), zap.Stringer("from", s.wal.Tracker().Confirmed()),
		zap.Uint64("stream_seq", info.LastSeq), zap.Stringer("recovery_lsn", s.recovered.recoveryLSN))
	s.status.deliver(ctx, stateStreaming)
	delivering, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.poller.Run(delivering); err != nil {
			stop(err)
		}
	})
	wg.Go(func() { (&replayer{session: s}).run(delivering) })
	wg.Go(func() {
		if err := s.join(delivering); err != nil {
			stop(err)
		}
	})
	if s.cfg.Once {
		wg.Go(func() {
			if err := s.endOnce(delivering); err != nil {
				stop(err)
			}
		})
	}
	defer wg.Wait()
	defer stop(nil)
	if err := s.wal.Run(delivering, handler, s.publisher.MostPayload()); err != nil {
		return err
	}
	return context.Cause(delivering)
}

// polled is a session that reads no WAL: the poller delivers everything. beside runs
// next to it; when it returns, the session ends.
func (s *session) polled(
	ctx, held context.Context, sys stream.System, beside func(context.Context, *session) error,
) error {
	s.status.runsAs(modePoll, &s.stored)
	info, err := s.awaitStream(ctx, s.fence)
	if err != nil {
		return err
	}
	s.metrics.setMode(modePoll)
	if err := s.begin(ctx, sys, info); err != nil {
		return err
	}
	defer s.close()
	return s.run(ctx, held, func(ctx context.Context) error { return s.poll(ctx, beside) })
}

// poll is the work of a session that polls.
func (s *session) poll(ctx context.Context, beside func(context.Context, *session) error) error {
	if err := s.heal(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.status.deliver(ctx, statePolling)
	delivering, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { stop(beside(delivering, s)) })
	wg.Go(func() { s.poller.Listen(delivering, s.db) })
	if s.recovered.awaitsRows() {
		wg.Go(func() {
			const step = "deliver what transactions had open that were not visible at the begin"
			if s.poller.Answer(delivering, step, s.outboxes...) == nil {
				s.recovered.forget()
			}
		})
	}
	wg.Go(func() { (&replayer{session: s}).run(delivering) })
	defer wg.Wait()
	defer stop(nil)
	if err := s.poller.Run(delivering); err != nil {
		return err
	}
	return context.Cause(delivering)
}

// begin reads the stream back and opens a publisher behind what it found.
func (s *session) begin(ctx context.Context, sys stream.System, info *jetstream.StreamInfo) (err error) {
	s.transformed = info.Config.SubjectTransform != nil
	s.status.do("read the stream back")
	r := &recovery{
		reporter: s.reporter, servers: s.servers, past: s.past, db: s.db, wal: s.wal, sys: sys, info: info,
	}
	if s.recovered, err = r.run(ctx); err != nil {
		return err
	}
	s.noter = r.noter
	if err := s.judgeRivals(info.LastSeq); err != nil {
		return err
	}
	s.holds, s.moved = fallback.NewHolds(mostHeld), fallback.NewMoved(mostMoved)
	records := func(t *outbox.Table, each func(outbox.AggregateKey)) error {
		return s.db.Aggregates(ctx, t, each)
	}
	err = s.holds.Load(records, s.outboxes)
	if err != nil {
		return err
	}
	if s.publisher, err = s.newPublisher(ctx, info, sys); err != nil {
		return err
	}
	s.marker = newMarker(s.reporter, s.cfg.Retry, s.db, s.publisher, s.holds, s.recovered)
	s.marker.noter = s.noter
	s.poller, err = s.newPoller(ctx)
	if err != nil {
		s.publisher.Close()
		return err
	}
	s.marker.parked = s.poller.Nudge
	s.current.Store(s)
	return nil
}

// heal delivers what the stream had lost, and what else was recorded and may be
// sent, before anything else.
func (s *session) heal(ctx context.Context) error {
	if s.recovered.healed == 0 && !s.holds.Any() {
		return nil
	}
	s.status.do("deliver what the stream has lost, and what was recorded")
	err := s.poller.Heal(ctx, s.recovered.healed > 0)
	// The WAL may still bring the rows that were sent just now.
	s.recovered.recoveryLSN = max(s.recovered.recoveryLSN, s.publisher.Passed())
	return err
}

// expectMoved has the table decide about every row of partitioned tables that the WAL may
// bring a second time: what an earlier session has sent may have moved since.
func (s *session) expectMoved(ctx context.Context) error {
	if !anyPartitioned(s.outboxes) {
		return nil
	}
	s.marker.Busy(func(ref outbox.Ref) { s.moved.Take(ref) })
	lsn, err := s.db.InsertLSN(ctx)
	s.recovered.recoveryLSN = max(s.recovered.recoveryLSN, lsn)
	return err
}

func (s *session) close() {
	s.current.Store(nil)
	s.publisher.Close()
	s.poller.Close()
}

// open starts replication.
func (s *session) open(ctx context.Context) (*stream.Session, error) {
	byOID, err := s.db.ByOID(ctx, s.outboxes)
	if err != nil {
		return nil, err
	}
	wal, err := stream.Open(ctx, stream.Config{
		ByOID: byOID, Server: s.server(), Tables: s.outboxes, Log: s.log,
		Slot: s.cfg.Slot, Publication: s.cfg.Publication,
		HeldBack: func(why string) {
			if why == "" {
				s.over("standby_slot", alarm.StandbySlot)
			} else if !s.limited("standby_slot", 30*time.Second) {
				s.alarm(alarm.StandbySlot, zap.String("notice", why))
			}
		},
	})
	if err != nil {
		return nil, err
	}
	if err := refuseSynchronous(ctx, s.reporter, s.db, wal); err != nil {
		wal.Close(false)
		return nil, err
	}
	return wal, nil
}

// awaitStream waits until JetStream says where the stream ends. Meanwhile the
// replication connection is kept, ticked and not read.
func (s *session) awaitStream(
	ctx context.Context, ask func(context.Context) (*jetstream.StreamInfo, error),
) (*jetstream.StreamInfo, error) {
	gone := false
	s.status.own() // the lock and the slot are this relay's
	s.status.do("ask where the stream ends")
	defer s.away.Store(false)
	for first := true; ; first = false {
		info, err := ask(ctx)
		if err == nil {
			err = s.judgeStream(info)
		}
		s.failing(err)
		s.away.Store(err != nil)
		if err == nil {
			if !first {
				s.log.Info("the stream is back", zap.Uint64("last_seq", info.LastSeq))
			}
			return info, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if s.wal != nil && s.wal.Broken() {
			return nil, fmt.Errorf("wait for the stream: the replication connection is lost: %w", err)
		}
		f := failureOf(atStream, err)
		if first && f.alarm != alarm.StreamUnfit { // judgeStream has raised that one
			s.logFailure("JetStream is away: PostgreSQL keeps the WAL meanwhile", err)
		}
		if f.alarm == alarm.StreamGone && !gone {
			gone = true // maybe only now: a server that comes back may have lost its disk
			s.alarm(alarm.StreamGone, zap.Error(err))
		}
		sleep.For(ctx, 250*time.Millisecond)
	}
}

// fence asks where the stream ends, behind everything that was sent before.
func (s *session) fence(ctx context.Context) (*jetstream.StreamInfo, error) {
	if s.cfg.Stream.Shared {
		return s.stream.Info(ctx)
	}
	conn := s.connection()
	info, doubt, err := s.stream.Fence(ctx, conn != s.past.conn, s.past.lastSeq)
	if err != nil {
		return nil, err
	}
	if s.connection() != conn {
		return nil, errReconnected
	}
	if s.past.conn = conn; doubt != nil && !s.limited("fence", time.Minute) {
		s.log.Warn("it is not certain that everything sent before is stored: the session begins all the same",
			why(doubt)...)
	}
	return info, nil
}

// connection tells the present connection to NATS from earlier ones.
func (s *servers) connection() string {
	id, _ := s.nc.GetClientID()
	return fmt.Sprint(s.nc.ConnectedServerId(), "/", id)
}

// run works until work returns or the publisher or the marker fails, and then stops. If a failure ended the
// session, the marker's goroutine marks while the publisher drains. If ctx is done, that goroutine ends at
// once. Either way marker.finish marks what is left after the drain, for finishTimeout at most.
func (s *session) run(ctx, held context.Context, work func(context.Context) error) error {
	working, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if at := s.past.batchesAt; s.wal != nil && !at.IsZero() {
		defer time.AfterFunc(time.Until(at), func() { stop(errBatchesAgain) }).Stop()
	}
	ended := make(chan struct{}, 4)
	go func() {
		if err := s.watchFacts(working); err != nil {
			stop(err)
		}
		ended <- struct{}{}
	}()
	go func() { stop(work(working)); ended <- struct{}{} }()
	go func() { stop(s.marker.run(ctx)); ended <- struct{}{} }()
	go func() {
		select {
		case <-s.publisher.Failed():
			stop(s.publisher.Err())
		case <-working.Done():
		}
		ended <- struct{}{}
	}()
	<-working.Done()
	return s.stop(ctx, held, context.Cause(working), ended)
}

// stop ends what run has begun. Rows come to rest in the order in which they flow: the publisher drains, the
// marker marks and records, and then the slot's position is confirmed.
func (s *session) stop(ctx, held context.Context, cause error, ended <-chan struct{}) error {
	if s.wal != nil && !s.db.Alive() {
		s.wal.Close(false) // it may be known here before held is done
	}
	s.status.do(settleStep)
	refusals := s.drain(held)
	s.past.advance = len(refusals) > 0 || s.publisher.Progress()
	for range cap(ended) {
		<-ended
	}
	if err := s.noter.end(held, s.publisher); err != nil {
		s.log.Warn("the session's end could not be noted", why(err)...)
	}
	s.alarmFalseDuplicates(refusals)
	return s.finish(ctx, cause)
}

// alarmFalseDuplicates raises an alarm for each message that JetStream calls a duplicate and does not have.
func (s *session) alarmFalseDuplicates(refusals []publish.Refusal) {
	for _, x := range refusals {
		if x.Failure.Class == outbox.RowDuplicate {
			s.alarm(alarm.FalseDuplicate, zap.Stringer("row", x.Ref), zap.String("failure", x.Failure.Reason))
		}
	}
}

// drain lets what was sent be acknowledged and settled, while the lock is held. It
// returns the rows that JetStream refused.
func (s *session) drain(held context.Context) []publish.Refusal {
	ctx, cancel := context.WithTimeout(held, drainTimeout-finishTimeout)
	defer cancel()
	refused := slices.DeleteFunc(s.publisher.Drain(ctx), s.keepReplayed)
	s.marker.finish(held, refused) // the draining may have taken all its time
	return refused
}

// keepReplayed leaves to the next session that JetStream has refused a row that was published again. The
// row itself has not failed.
func (s *session) keepReplayed(x publish.Refusal) bool {
	if x.Replay == 0 {
		return false
	}
	if len(s.past.unreplayable) >= mostUnreplayable {
		clear(s.past.unreplayable)
	}
	s.past.unreplayable[replayedRow{x.Replay, x.Ref}] = x.Failure
	return true
}

// finish confirms what was settled and, while JetStream is away, keeps the
// connection.
func (s *session) finish(ctx context.Context, cause error) error {
	if n := s.publisher.Counts().Forgotten; n > 0 {
		s.metrics.retries.WithLabelValues(failureOf(atSessionEnd, cause).reason).Add(float64(n))
	}
	s.past.stored += s.stored.Load()
	s.past.lastSeq = max(s.past.lastSeq, s.publisher.LastSeq())
	s.past.publishedSeq, s.past.chained = s.publisher.LastSeq(), errors.Is(cause, publish.ErrChain)
	suspect, refused := s.publisher.BatchFailed()
	s.past.suspect = suspect
	if refused {
		s.refuseBatches(s.publisher.Err())
	}
	if s.publisher.Progress() {
		s.past.rivals = 0
	}
	if s.wal == nil {
		return cause
	}
	if ctx.Err() == nil && s.db.Alive() && !s.wal.Broken() {
		if _, err := s.stream.Info(ctx); err != nil {
			s.logFailure("session ended", cause)
			_, _ = s.awaitStream(ctx, s.stream.Info)
			if err := context.Cause(ctx); err != nil {
				cause = err // what ended the waiting
			}
		}
	}
	s.wal.Close(s.db.Alive())
	return cause
}

func (s *session) newPublisher(
	ctx context.Context, info *jetstream.StreamInfo, sys stream.System,
) (*publish.Publisher, error) {
	recovered, timeline := s.recovered, sys.Timeline
	if s.wal == nil { // see answerFirst
		timeline = cmp.Or(recovered.tail.Timeline, sys.Parent(), timeline)
	}
	publisher, err := publish.NewPublisher(ctx, publish.PublisherConfig{
		Conn: s.nc, Stream: s.stream, Subjects: s.subjects, Envelope: s.envelope,
		Chained: !s.cfg.Stream.Shared, Base: info.LastSeq,
		Window: s.cfg.Window, WindowBytes: s.cfg.WindowBytes,
		Batching: s.batching(info), OneByOne: s.past.suspect,
		Position: outbox.Position{
			SystemID: sys.ID, Timeline: timeline,
			Commit: recovered.tail.Commit, N: recovered.tail.N, Passed: recovered.recoveryLSN,
		},
		OnStored: s.onStored, IsGenuine: s.isGenuine, Check: s.cfg.Check, Trace: traceOf(s.cfg),
		Held: s.db.Held,
	})
	if err == nil {
		publisher.Adapt(info)
	}
	s.past.base = info.LastSeq
	return publisher, err
}

func (s *session) onStored(stored []publish.Stored) {
	now, total := time.Now().UnixMicro(), 0
	for _, m := range stored {
		total += m.N
		if m.Commit == 0 { // of a row of the table nobody knows when it was committed
			continue
		}
		d := time.Duration(now-m.Commit) * time.Microsecond
		for range m.N {
			s.metrics.observe(d, m.Trace)
			if s.cfg.OnStored != nil {
				s.cfg.OnStored(d)
			}
		}
	}
	s.metrics.throughput.Add(float64(total))
	s.stored.Add(int64(total))
}

// judgeRivals gives the place up after two chain errors in a row that messages
// of our own source caused: another relay is alive.
func (s *session) judgeRivals(lastSeq uint64) error {
	if s.cfg.Stream.Shared {
		return nil
	}
	// The last publisher's own messages may stand behind it.
	foreign := s.recovered.found.Foreign > 0 &&
		(s.recovered.found.Foreign == lastSeq || s.past.chained && s.recovered.found.Foreign > s.past.base)
	if foreign {
		detail := zap.Skip()
		if s.past.displaced >= stuckStarts {
			detail = zap.String("detail", fmt.Sprintf("nothing is delivered: such messages come faster than "+
				"a session begins, and ended the last %d before a row was stored", s.past.displaced))
		}
		s.alarm(alarm.ForeignMessage, zap.Uint64("sequence", s.recovered.found.Foreign),
			zap.String("writer", cmp.Or(s.recovered.found.Writer, jetstream.NoWriter)),
			detail, zap.String("hint", jetstream.OwnStream))
	}
	if s.past.chained && !foreign && s.recovered.found.Tail.Seq > s.past.publishedSeq {
		s.past.rivals++
	} else {
		s.past.rivals = 0
	}
	s.past.chained = false
	if s.past.rivals < 2 {
		return nil
	}
	s.past.rivals = 0
	s.alarm(alarm.Rival)
	return hint.Errorf(
		"give every relay a stream of its own (nats.stream, nats.subject), or name all tables in "+
			"the outboxes of one relay; only relays with the same outboxes and stream share a slot",
		"%w", ErrRival)
}
