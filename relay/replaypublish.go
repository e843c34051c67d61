package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// publish reads rows and publishes them until there are no more. It reads none while it publishes others: on
// a machine of few processors live rows find one that is free.
func (p *replay) publish(ctx context.Context) (err error) {
	rows, err := table.OpenReplay(
		ctx, p.database(), p.table, p.ReplayChoice, p.Cursor, p.publisher.MostPayload())
	if err != nil {
		return err
	}
	defer rows.Close()
	reading, stop := context.WithCancel(ctx)
	portions := make(chan []table.ReplayRow)
	published := make(chan int, 1) // and how many rows the next portion may have
	var readErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(portions)
		readErr = rows.Read(reading, func(some []table.ReplayRow) error {
			select {
			case portions <- some:
			case <-reading.Done():
				return reading.Err()
			}
			select {
			case rows.Fetch = <-published:
				return nil
			case <-reading.Done():
				return reading.Err()
			}
		})
	})
	defer wg.Wait()
	defer stop()
	if ok, err := p.each(ctx, portions, published); err != nil || !ok {
		return err
	}
	if readErr != nil {
		return readErr
	}
	return p.finish(ctx)
}

// each publishes portions until there are no more. A search for few rows among many may take long:
// meanwhile it is asked whether the request still runs.
func (p *replay) each(
	ctx context.Context, portions <-chan []table.ReplayRow, published chan<- int,
) (ok bool, err error) {
	waiting := time.NewTicker(replayLook)
	defer waiting.Stop()
	for {
		select {
		case some, more := <-portions:
			if !more {
				return true, nil
			}
			crash.At("replay-read")
			if ok, err = p.portion(ctx, some); ok {
				published <- p.sender.portion()
			}
		case <-waiting.C:
			ok, err = p.write(ctx)
		}
		if err != nil || !ok {
			return false, err
		}
	}
}

// portion publishes rows in chunks. It reports false where the request does not run any more.
func (p *replay) portion(ctx context.Context, rows []table.ReplayRow) (ok bool, err error) {
	for len(rows) > 0 {
		n := min(p.sender.size(), len(rows))
		if err := p.sender.awaitSpare(ctx); err != nil {
			return false, err
		}
		if err := p.chunk(ctx, rows[:n]); err != nil {
			return false, err
		}
		p.unwritten += n
		last := rows[n-1]
		p.Cursor.At, p.Cursor.ID = last.At, string(last.Values[outbox.ID])
		p.Cursor.Sequence = max(p.Cursor.Sequence, p.sender.acks.sequence())
		rows = rows[n:]
		if time.Since(p.written) < replayEvery && p.unwritten < replayRows {
			continue
		}
		if ok, err := p.write(ctx); err != nil || !ok {
			return ok, err
		}
	}
	return true, nil
}

// chunk publishes rows and waits for their PubAcks.
func (p *replay) chunk(ctx context.Context, rows []table.ReplayRow) error {
	begun, sent := time.Now(), int64(0)
	for _, row := range rows {
		ok, err := p.send(ctx, row)
		if err != nil {
			return err
		}
		if ok {
			sent++
		}
	}
	if sent == 0 {
		return nil
	}
	if err := p.sender.publisher.Flush(); err != nil {
		return err
	}
	crash.At("replay-sent")
	if err := p.sender.awaitAcks(ctx); err != nil {
		return err
	}
	crash.At("replay-stored")
	p.sender.adapt(len(rows), time.Since(begun), p.stored.Load())
	p.sender.pause(ctx, len(rows))
	p.Sent += sent
	p.metrics.replayed.Add(float64(sent))
	p.show()
	return nil
}

// send reports false for a row that was sent before, or that cannot be sent.
func (p *replay) send(ctx context.Context, row table.ReplayRow) (sent bool, err error) {
	if row.Unreadable != nil {
		p.refuse(row, row.Unreadable)
		return false, nil
	}
	if len(p.found)+len(p.past.unreplayable) > 0 {
		ref := row.Ref()
		if own, err := p.wasSent(ctx, row.Event, ref); err != nil || own {
			return false, err
		}
		if failure := p.past.unreplayable[replayedRow{p.ID, ref}]; failure != nil {
			p.refuse(row, failure)
			return false, nil
		}
	}
	err = p.sender.send(ctx, row.Event, p.ID)
	var refused *outbox.RowError
	if errors.As(err, &refused) {
		if p.ToStream != nil && refused.Class == outbox.RowPermission {
			return false, hint.Errorf("let the relay publish on the subjects of stream "+*p.ToStream,
				"%w: %w", errReplay, refused)
		}
		p.refuse(row, refused)
		return false, nil
	}
	return err == nil, err
}

// wasSent looks for the row's own message among those that an earlier session may have sent, and counts it.
func (p *replay) wasSent(ctx context.Context, ev *outbox.Event, ref outbox.Ref) (bool, error) {
	key := hashOf(ref)
	defer delete(p.found, key)
	for _, seq := range p.found[key] {
		own, err := p.sender.like.own(ctx, p.sender.stream, ev, p.ID, seq)
		if err != nil {
			return false, err
		}
		if own {
			p.Sent++
			return true, nil
		}
		p.alarmForged(ref, seq)
	}
	return false, nil
}

// refuse counts a row that cannot be published again. That is no attempt, and the row stays as it is.
func (p *replay) refuse(row table.ReplayRow, failure error) {
	p.Refused++
	text := fmt.Sprintf("row %s: %v", row.Values[outbox.ID], failure)
	if p.LastError == nil {
		p.LastError = &text
	}
	if !p.limited("replay_refused", time.Minute) {
		p.log.Warn("a row cannot be published again: the replay goes on without it",
			append(p.fields(), zap.String("failure", text), p.leftOut("replay_refused"))...)
	}
}

// write writes the cursor: everything up to it is stored or refused.
func (p *replay) write(ctx context.Context) (ok bool, err error) {
	if ok, err = p.db.AdvanceReplay(ctx, p.Replay); err != nil {
		return false, err
	}
	crash.At("replay-written")
	p.written, p.unwritten = time.Now(), 0
	if !ok {
		p.log.Info("replay was cancelled", p.fields()...)
	}
	return ok, nil
}

func (p *replay) finish(ctx context.Context) error {
	ok, err := p.write(ctx)
	if err != nil || !ok {
		return err
	}
	if err := p.db.EndReplay(ctx, p.ID, table.ReplayDone, nil); err != nil {
		return err
	}
	crash.At("replay-ended")
	took := time.Since(p.begun).Round(time.Millisecond)
	p.log.Info("replay is done", append(p.fields(), zap.Duration("took", took))...)
	return nil
}

func (p *replay) show() {
	s := &ReplayStatus{ID: p.ID, Outbox: p.Outbox, Sent: p.Sent, Refused: p.Refused, Total: p.Total}
	if p.ToStream != nil {
		s.ToStream = *p.ToStream
	}
	p.status.replaying(s)
	if p.Total != nil {
		p.metrics.replayPending.Set(float64(max(*p.Total-p.Sent-p.Refused, 0)))
	}
}
