package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// drainTimeout is how long an ending session waits for the PubAcks and marks of
// what it has sent, finishTimeout for the last marks included. What is not there by then is
// found by the next read-back.
const drainTimeout = 10 * time.Second

// errSynchronous: the server counts the relay among its synchronous standbys.
var errSynchronous = errors.New("the server waits for the relay as for a synchronous standby")

// errReconnected: part of the answer may be the next connection's, which proves nothing.
var errReconnected = errors.New("ask where the stream ends: the connection to NATS was lost and made again meanwhile")

// streamed is a session that reads the WAL. It lasts until something fails or ctx is
// done, which it is at the latest when held is: then the lock's connection is lost.
func (r *Relay) streamed(ctx, held context.Context, db *fallback.DB) (err error) {
	r.status.do("start replication")
	wal, err := r.open(ctx, db)
	if err != nil {
		return err
	}
	defer wal.Close(false) // nothing to confirm where it was not closed before
	// At once, whatever the session is doing, so that a server that shuts down is
	// not held up.
	defer context.AfterFunc(held, func() { wal.Close(false) })()
	if err := r.published.begin(ctx, db, wal); err != nil {
		r.trouble("the publication cannot be looked at: trying again", err)
	}
	r.recoveryLSN.Store(math.MaxUint64) // until it is known
	ctx, stop := context.WithCancelCause(ctx)
	defer func() {
		if errors.Is(err, context.Canceled) {
			err = context.Cause(ctx)
		}
	}()
	var watching sync.WaitGroup
	watching.Go(func() { stop(r.watchServer(ctx, db, wal)) })
	defer func() { stop(nil); watching.Wait() }()
	info, err := r.awaitStream(ctx, wal, r.fence)
	if err != nil {
		return err
	}
	r.metrics.setMode(modeStream)
	s, err := r.newSession(ctx, db, wal, wal.System(), info)
	if err != nil {
		return err
	}
	defer s.close()
	if r.mayLackRecords(wal.System(), s.recovered) {
		return &unanswered{wal.System()}
	}
	r.recoveryLSN.Store(uint64(s.recovered.recoveryLSN))
	return s.run(ctx, held, func(ctx context.Context) error {
		if err := s.heal(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := s.expectMoved(ctx); err != nil {
			return err
		}
		s.feed = &feed{
			reporter: r.reporter, cfg: r.cfg, db: db, lane: s.lane, settler: s.settler, holds: s.holds, loop: s.loop,
			recovered: s.recovered, moved: s.loop.moved, altered: s.altered, poison: r.poison,
		}
		s.loop.wal, s.loop.feed = wal, s.feed
		r.recoveryLSN.Store(uint64(s.recovered.recoveryLSN))
		r.log.Info("streaming", zap.String("slot", r.cfg.Slot), zap.Stringer("from", wal.Tracker().Confirmed()),
			zap.Uint64("stream_seq", info.LastSeq), zap.Stringer("table_decides_until", s.recovered.recoveryLSN))
		r.status.deliver(ctx, stateStreaming)
		looping, stop := context.WithCancelCause(ctx)
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := s.loop.run(looping); err != nil {
				stop(err)
			}
		})
		defer wg.Wait()
		defer stop(nil)
		if err := wal.Run(looping, s.feed, s.lane.MostPayload()); err != nil {
			return err
		}
		return context.Cause(looping)
	})
}

// polled is a session that reads no WAL: the loop delivers everything. beside runs
// next to it; when it returns, the session ends.
func (r *Relay) polled(ctx, held context.Context, db *fallback.DB, sys stream.System, beside func(context.Context, *session) error) error {
	info, err := r.awaitStream(ctx, nil, r.fence)
	if err != nil {
		return err
	}
	r.metrics.setMode(modePoll)
	s, err := r.newSession(ctx, db, nil, sys, info)
	if err != nil {
		return err
	}
	defer s.close()
	return s.run(ctx, held, func(ctx context.Context) error {
		if err := s.heal(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.status.deliver(ctx, statePolling)
		looping, stop := context.WithCancelCause(ctx)
		var wg sync.WaitGroup
		wg.Go(func() { stop(beside(looping, s)) })
		wg.Go(func() { listen(looping, db, s.loop) })
		defer wg.Wait()
		defer stop(nil)
		if err := s.loop.run(looping); err != nil {
			return err
		}
		return context.Cause(looping)
	})
}

// session is one lane and what flows into it.
type session struct {
	r         *Relay
	db        *fallback.DB
	wal       *stream.Session // nil where none is read
	lane      *publish.Lane
	settler   *settler
	holds     *holds
	loop      *loop
	feed      *feed
	recovered *recoveryState
	altered   chan struct{} // asks watchFacts for a look now
}

// newSession reads the stream back and opens a lane behind what it found.
func (r *Relay) newSession(ctx context.Context, db *fallback.DB, wal *stream.Session, sys stream.System, info *jetstream.StreamInfo) (*session, error) {
	r.status.do("read the stream back")
	recovered, err := r.recover(ctx, db, wal, sys, info)
	if err != nil {
		return nil, err
	}
	if err := r.judgeRivals(recovered, info.LastSeq); err != nil {
		return nil, err
	}
	s := &session{r: r, db: db, wal: wal, recovered: recovered, holds: newHolds(), altered: make(chan struct{}, 1)}
	err = s.holds.load(func(t *outbox.Table, each func(outbox.AggregateKey)) error { return db.Aggregates(ctx, t, each) }, r.cfg.Outboxes)
	if err != nil {
		return nil, err
	}
	if s.lane, err = s.newLane(ctx, info, sys, recovered); err != nil {
		return nil, err
	}
	s.settler = newSettler(r.reporter, r.cfg.Retry, db, s.lane, s.holds, recovered)
	if s.loop, err = newLoop(ctx, r.reporter, r.servers, s.lane, s.settler, s.holds, recovered); err != nil {
		s.lane.Close()
		return nil, err
	}
	s.settler.parked = s.loop.nudge
	r.current.Store(s)
	return s, nil
}

// heal delivers what the stream had lost, and what else was recorded and may be
// sent, before anything else.
func (s *session) heal(ctx context.Context) error {
	if s.recovered.healed == 0 && !s.holds.any() {
		return nil
	}
	s.r.status.do("deliver what the stream has lost, and what was recorded")
	err := s.loop.heal(ctx)
	// The WAL is yet to bring what was sent just now, if it does.
	s.recovered.recoveryLSN = max(s.recovered.recoveryLSN, s.lane.Passed())
	return err
}

// expectMoved has the table decide about every row of partitioned tables that the WAL may
// bring a second time: what an earlier session has sent may have moved since.
func (s *session) expectMoved(ctx context.Context) error {
	if !anyPartitioned(s.r.cfg.Outboxes) {
		return nil
	}
	s.settler.busy(func(ref outbox.Ref) { s.loop.moved.take(ref) })
	lsn, err := s.db.InsertLSN(ctx)
	s.recovered.recoveryLSN = max(s.recovered.recoveryLSN, lsn)
	return err
}

func (s *session) close() {
	s.r.current.Store(nil)
	s.lane.Close()
	s.loop.db.Close()
}

// open starts replication.
func (r *Relay) open(ctx context.Context, db *fallback.DB) (*stream.Session, error) {
	wal, err := stream.Open(ctx, stream.Config{
		URL: r.cfg.PostgresURL, Files: r.cfg.PostgresFiles, Slot: r.cfg.Slot, Publication: r.cfg.Publication, Tables: r.cfg.Outboxes, Log: r.log,
		HeldBack: func(why string) {
			if !r.limited("standby_slot", 30*time.Second) {
				r.alarm("standby_slot", "PostgreSQL sends no WAL: it waits for a standby that synchronized_standby_slots names", zap.String("notice", why))
			}
		},
	})
	if err != nil {
		return nil, err
	}
	if err := r.refuseSynchronous(ctx, db, wal); err != nil {
		wal.Close(false)
		return nil, err
	}
	return wal, nil
}

// awaitStream waits until JetStream says where the stream ends. Meanwhile the
// replication connection is kept, ticked and not read.
func (r *Relay) awaitStream(ctx context.Context, wal *stream.Session, ask func(context.Context) (*jetstream.StreamInfo, error)) (*jetstream.StreamInfo, error) {
	gone := false
	r.status.own() // the lock and the slot are this relay's
	r.status.do("ask where the stream ends")
	defer r.away.Store(false)
	for first := true; ; first = false {
		info, err := ask(ctx)
		if err == nil {
			err = r.judgeStream(info)
		}
		r.status.failing(err)
		r.away.Store(err != nil)
		if err == nil {
			if !first {
				r.log.Info("the stream is back", zap.Uint64("last_seq", info.LastSeq))
			}
			return info, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if wal != nil && wal.Broken() {
			return nil, fmt.Errorf("wait for the stream: the replication connection is lost: %w", err)
		}
		if first && !errors.Is(err, errStreamUnfit) {
			r.logFailure("JetStream is away: PostgreSQL keeps the WAL meanwhile", err)
		}
		if errors.Is(err, jetstream.ErrStreamNotFound) && !gone {
			gone = true // maybe only now: a server that comes back may have lost its disk
			r.alarm("stream_gone", "the stream does not exist any more; it is not recreated under a running relay", zap.Error(err))
		}
		sleep(ctx, 250*time.Millisecond)
	}
}

// fence asks where the stream ends, behind everything that was sent before.
func (r *Relay) fence(ctx context.Context) (*jetstream.StreamInfo, error) {
	if r.cfg.Stream.Shared {
		return r.stream.Info(ctx)
	}
	conn := r.connection()
	info, doubt, err := r.stream.Fence(ctx, conn != r.known.conn, r.known.lastSeq)
	if err != nil {
		return nil, err
	}
	if r.connection() != conn {
		return nil, errReconnected
	}
	if r.known.conn = conn; doubt != nil && !r.limited("fence", time.Minute) {
		r.log.Warn("it is not certain that everything sent before is stored: the session begins all the same", why(doubt)...)
	}
	return info, nil
}

// connection tells the present connection to NATS from earlier ones.
func (r *Relay) connection() string {
	id, _ := r.nc.GetClientID()
	return fmt.Sprint(r.nc.ConnectedServerId(), "/", id)
}

// run works until work returns or the lane or the settler fails, and then settles
// what was sent.
func (s *session) run(ctx, held context.Context, work func(context.Context) error) error {
	r := s.r
	working, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if at := r.known.batchesAt; s.wal != nil && !at.IsZero() {
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
	go func() { stop(s.settler.run(ctx)); ended <- struct{}{} }()
	go func() {
		select {
		case <-s.lane.Failed():
			stop(s.lane.Err())
		case <-working.Done():
		}
		ended <- struct{}{}
	}()
	<-working.Done()
	cause := context.Cause(working)
	if s.wal != nil && !s.db.Alive() {
		s.wal.Close(false) // it may be known here before held is done
	}
	r.status.do(settleStep)
	refusals := s.drain(held)
	r.known.advance = len(refusals) > 0 || s.lane.Progress()
	for range cap(ended) {
		<-ended
	}
	for _, x := range refusals {
		if x.Failure.Class == publish.RowDuplicate {
			r.alarm("false_duplicate", "JetStream calls a message a duplicate that is not in the stream: its row is parked",
				zap.Stringer("row", x.Ref), zap.String("failure", x.Failure.Reason))
		}
		if x.Ref.Table.Mark == outbox.MarkNone {
			r.poison[x.Ref] = x.Failure
		}
	}
	return s.finish(ctx, cause)
}

// drain lets what was sent be acknowledged and settled, while the lock is held. It
// returns the rows that JetStream refused.
func (s *session) drain(held context.Context) []publish.Refusal {
	ctx, cancel := context.WithTimeout(held, drainTimeout-finishTimeout)
	defer cancel()
	refused := s.lane.Drain(ctx)
	s.settler.finish(held, refused) // the draining may have taken all its time
	return refused
}

// finish confirms what was settled and, while JetStream is away, keeps the
// connection.
func (s *session) finish(ctx context.Context, cause error) error {
	r := s.r
	if n := s.lane.Counts().Forgotten; n > 0 {
		r.metrics.retries.WithLabelValues(reason(cause)).Add(float64(n))
	}
	r.known.lastSeq = max(r.known.lastSeq, s.lane.LastSeq())
	r.known.laneSeq, r.known.chained = s.lane.LastSeq(), errors.Is(cause, publish.ErrChain)
	suspect, refused := s.lane.BatchFailed()
	r.known.suspect = suspect
	if refused {
		r.refuseBatches(s.lane.Err())
	}
	if s.lane.Progress() {
		r.known.rivals = 0
	}
	if s.wal == nil {
		return cause
	}
	if ctx.Err() == nil && s.db.Alive() && !s.wal.Broken() {
		if _, err := r.stream.Info(ctx); err != nil {
			r.logFailure("session ended", cause)
			_, _ = r.awaitStream(ctx, s.wal, r.stream.Info)
			if err := context.Cause(ctx); err != nil {
				cause = err // what ended the waiting
			}
		}
	}
	s.wal.Close(s.db.Alive())
	return cause
}

func (s *session) newLane(ctx context.Context, info *jetstream.StreamInfo, sys stream.System, recovered *recoveryState) (*publish.Lane, error) {
	r, timeline := s.r, sys.Timeline
	if s.wal == nil { // see answerFirst
		timeline = cmp.Or(recovered.tail.Timeline, sys.Parent(), timeline)
	}
	lane, err := publish.NewLane(ctx, publish.LaneConfig{
		Conn: r.nc, Stream: r.stream, Subjects: r.subjects, Envelope: r.envelope,
		Chained: !r.cfg.Stream.Shared, Base: info.LastSeq,
		Window: r.cfg.Window, WindowBytes: r.cfg.WindowBytes,
		Batching: r.batching(info), OneByOne: r.known.suspect,
		Position: outbox.Position{
			SystemID: sys.ID, Timeline: timeline, Commit: recovered.tail.Commit, N: recovered.tail.N, Passed: recovered.recoveryLSN,
		},
		OnStored: r.onStored, IsGenuine: s.isGenuine,
	})
	if err == nil {
		lane.Adapt(info)
	}
	r.known.base = info.LastSeq
	return lane, err
}

func (r *Relay) onStored(stored []publish.Stored) {
	now, total := time.Now().UnixMicro(), 0
	for _, s := range stored {
		total += s.N
		if s.Commit == 0 { // of a row of the table nobody knows when it was committed
			continue
		}
		d := time.Duration(now-s.Commit) * time.Microsecond
		for range s.N {
			r.metrics.latency.Observe(d.Seconds())
			if r.cfg.OnStored != nil {
				r.cfg.OnStored(d)
			}
		}
	}
	r.metrics.throughput.Add(float64(total))
	r.stored.Add(int64(total))
}

// judgeRivals gives the place up after two chain errors in a row that messages
// of our own source caused: another relay is alive.
func (r *Relay) judgeRivals(s *recoveryState, lastSeq uint64) error {
	if r.cfg.Stream.Shared {
		return nil
	}
	// The last lane's own messages may stand behind it.
	foreign := s.found.Foreign > 0 && (s.found.Foreign == lastSeq || r.known.chained && s.found.Foreign > r.known.base)
	if foreign {
		r.alarm("foreign_message", "somebody else writes to the stream that belongs to this relay alone")
	}
	if r.known.chained && !foreign && s.found.Tail.Seq > r.known.laneSeq {
		r.known.rivals++
	} else {
		r.known.rivals = 0
	}
	r.known.chained = false
	if r.known.rivals < 2 {
		return nil
	}
	r.known.rivals = 0
	r.alarm("rival", "another relay of this source writes to the stream: standing by")
	return hint.Errorf("give every database a source of its own, and every relay of one database the same slot name", "%w", ErrRival)
}
