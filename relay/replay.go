package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// replayLook is the pause between two looks for requests.
	replayLook = time.Second
	// replayTable is the pause between two looks for their table, where it is missing.
	replayTable = time.Minute
	// The cursor of a request is written after replayEvery or replayRows rows. Rows behind it are looked
	// for in the stream by the next session.
	replayEvery = 500 * time.Millisecond
	replayRows  = 2 * jetstream.U
)

// replayer has stored rows published again, as requests in the database say, one request after the other. A
// session runs it beside its work, on one goroutine, which owns it.
type replayer struct {
	*session
	failed backoff
}

// run looks for requests until ctx is done.
func (r *replayer) run(ctx context.Context) {
	if !r.awaitTable(ctx) {
		return
	}
	r.failed = backoff{least: time.Second, most: 30 * time.Second}
	defer r.status.replaying(nil)
	defer r.metrics.replayPending.Set(0)
	for ctx.Err() == nil && r.publisher.Err() == nil {
		request, err := r.db.NextReplay(ctx, r.cfg.Slot, r.asideNames())
		trouble := "requests for replays cannot be read: trying again"
		if err == nil && request != nil {
			trouble = "a replay is interrupted: trying again"
			if err = r.fulfil(ctx, request); err == nil {
				r.failed.reset()
			}
			r.status.replaying(nil)
			r.metrics.replayPending.Set(0)
		}
		switch {
		case ctx.Err() != nil || r.publisher.Err() != nil || !r.db.Alive():
			return
		case err != nil:
			r.trouble(trouble, err, why(err)[1:]...)
			r.failed.wait(ctx)
		case request == nil:
			r.failed.reset()
			sleep.For(ctx, replayLook)
		}
	}
}

// asideNames are the outboxes whose requests wait.
func (s *servers) asideNames() (names []string) {
	for _, a := range s.aside {
		if !slices.ContainsFunc(s.outboxes, func(t *outbox.Table) bool { return t.String() == a.Outbox }) {
			names = append(names, a.Outbox)
		}
	}
	return names
}

// awaitTable waits until there is a table of requests that the role may use. It is asked for without an
// error in the server's log.
func (r *replayer) awaitTable(ctx context.Context) bool {
	for {
		there, err := r.db.TakesReplays(ctx)
		if err == nil && there {
			return true
		}
		if err != nil && ctx.Err() == nil && r.db.Alive() && !r.limited("replays", time.Hour) {
			r.log.Warn("no replay can be requested", why(err)...)
		}
		if !sleep.For(ctx, replayTable) {
			return false
		}
	}
}

// fulfil works on a request until it is finished, or an error that may pass.
func (r *replayer) fulfil(ctx context.Context, request *table.Replay) error {
	p := &replay{replayer: r, Replay: request, begun: time.Now()}
	err := p.open(ctx)
	if err == nil {
		defer p.sender.close()
		err = p.start(ctx)
	}
	if err == nil && p.State == table.ReplayRunning {
		err = p.publish(ctx)
	}
	if err == nil || ctx.Err() != nil || failureOf(inReplay, err).outcome == waitOut {
		return err
	}
	r.log.Error("a replay has failed", append(why(err), p.fields()...)...)
	text := err.Error()
	if h := hint.Of(err); h != "" {
		text += " (" + h + ")"
	}
	return r.db.EndReplay(ctx, p.ID, table.ReplayFailed, &text)
}

// errReplay marks what no other try changes.
var errReplay = errors.New("the request cannot be fulfilled")

// replay is a request that is being fulfilled.
type replay struct {
	*replayer
	*table.Replay
	table  *outbox.Table
	sender replaySender
	begun  time.Time
	// found are messages of rows that an earlier session has sent behind the cursor, by hashes of the rows:
	// anybody who may publish chooses the ids.
	found map[rowHash][]uint64

	written   time.Time // when the cursor was
	unwritten int       // rows since
}

// open finds the outbox and the stream.
func (p *replay) open(ctx context.Context) error {
	for _, t := range p.outboxes {
		if t.String() == p.Outbox {
			p.table = t
		}
	}
	if p.table == nil {
		return hint.Errorf("run `walpost replay` with the relay's configuration",
			"outbox %s is none of the relay's: %w", p.Outbox, errReplay)
	}
	if err := table.CheckReplayable(p.table); err != nil {
		return fmt.Errorf("%w: %w", errReplay, err)
	}
	if p.ToStream == nil {
		p.sender = newOwnSender(p.session)
		return nil
	}
	var err error
	p.sender, err = openOtherSender(ctx, p.session, *p.ToStream)
	return err
}

// start begins a request, or finds out what an earlier session has done for it.
func (p *replay) start(ctx context.Context) (err error) {
	info, err := p.sender.end(ctx)
	if err != nil {
		return err
	}
	p.written = time.Now()
	if p.State == table.ReplayRequested {
		p.Cursor.Created, p.Cursor.Sequence = info.Created, info.LastSeq
		ok, err := p.db.BeginReplay(ctx, p.ID, p.Cursor)
		if err == nil && ok {
			p.State = table.ReplayRunning
			p.log.Info("replay begins", p.fields()...)
			crash.At("replay-begun")
		}
		return err
	}
	if err := p.noticeStuck(); err != nil {
		return err
	}
	p.noteLoss(info)
	p.written = time.Time{} // the first chunk shows that it gets on
	p.found = map[rowHash][]uint64{}
	err = p.sender.stream.ScanForward(ctx, p.Cursor.Sequence+1, info.LastSeq, jetstream.ScanOptions{
		Source: p.envelope.Source(), NoConsumer: p.alarmNoConsumer,
		Step: func(messages []jetstream.Message) (bool, error) {
			for _, m := range messages {
				if m.ID.Request == p.ID && m.ID.Table == p.Outbox {
					key := hashOf(refOf(p.table, m))
					p.found[key] = append(p.found[key], m.Seq)
				}
			}
			return true, nil
		},
	})
	p.log.Info("replay goes on", append(p.fields(), zap.Int("found_in_stream", len(p.found)))...)
	crash.At("replay-scanned")
	return err
}

// mostStuck is how many times in a row a request may be taken up without a row more. Something in it that
// no check foresees must not end one session after the other.
const mostStuck = 20

func (p *replay) noticeStuck() error {
	s := &p.past.stuckReplay
	if s.id != p.ID || s.at != p.Cursor {
		*s = stuckReplay{id: p.ID, at: p.Cursor}
	}
	if s.times++; s.times <= mostStuck {
		return nil
	}
	return hint.Errorf(
		"the relay's log says what ended its sessions: leave out the first row that is missing",
		"%d sessions in a row ended before a row more was published: %w", mostStuck, errReplay)
}

// noteLoss notices that the stream is not the one that the cursor is of, or has lost messages of the replay.
func (p *replay) noteLoss(info *jetstream.StreamInfo) {
	note := ""
	switch {
	case !info.Created.Truncate(time.Microsecond).Equal(p.Cursor.Created): // as PostgreSQL has it
		note = "the stream was recreated meanwhile: it lacks what was published before"
	case info.LastSeq < p.Cursor.Sequence:
		note = "the stream was rolled back meanwhile: it may lack rows that were published before"
	default:
		return
	}
	p.LastError, p.Cursor.Created, p.Cursor.Sequence = &note, info.Created, info.LastSeq
	p.log.Warn("replay: "+note, p.fields()...)
}

func (p *replay) fields() []zap.Field {
	f := []zap.Field{
		zap.Int64("replay", p.ID), zap.String("outbox", p.Outbox), zap.Int64("sent", p.Sent),
		zap.Int64("refused", p.Refused),
	}
	if p.ToStream != nil {
		f = append(f, zap.String("to_stream", *p.ToStream))
	}
	return f
}

// replayedRow is a row that was published again for a request.
type replayedRow struct {
	request int64
	ref     outbox.Ref
}

// rowHash stands for a row.
type rowHash struct{ id, content uint64 }

func hashOf(ref outbox.Ref) rowHash { return rowHash{outbox.HashText([]byte(ref.ID), 0), ref.Hash} }
