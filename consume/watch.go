package consume

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
)

// ErrGap means that the stream's limits deleted events before they were read.
var ErrGap = errors.New("the stream deleted events before they were read")

// watch looks at the stream every second: whether it is the one that is read, how far it has nothing more for
// this consumer, and whether its limits took unread events.
func (f *feed) watch(ctx context.Context) {
	for sleep.For(ctx, time.Second) {
		f.mu.Lock()
		readers := make([]*reader, 0, len(f.readers))
		for r := range f.readers {
			readers = append(readers, r)
		}
		f.mu.Unlock()
		var err error
		for _, r := range readers {
			err = errors.Join(err, sure(ctx, r.look))
		}
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, jetstream.ErrNotTheStream), errors.Is(err, ErrGap):
			f.fail(err)
			return
		}
		f.waits.set("look at the stream", err)
	}
}

// look checks one reader. The reader goes on meanwhile: its position moves only where it is still the one
// from before.
func (r *reader) look(ctx context.Context) error {
	r.mu.Lock()
	pos, last, jumped := r.pos, r.last, r.jumped
	r.jumped = 0
	r.mu.Unlock()
	info, err := r.stream.Info(ctx)
	if err == nil {
		_, err = r.recognize(ctx, info, pos, last)
	}
	if err != nil {
		r.jump(jumped) // it is for the next look
		return err
	}
	err = r.missed(info.FirstSeq, pos, jumped)
	if err != nil || info.LastSeq <= pos || info.FirstSeq > pos+1 {
		return err
	}
	end, err := r.stream.Last(ctx)
	if err == nil {
		err = r.nothingUpTo(ctx, pos, end.Seq)
	}
	if errors.Is(err, errMore) || errors.Is(err, jetstream.ErrMessageGone) {
		return nil
	} else if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pos == pos {
		r.pos, r.last = end.Seq, newAnchor(end.Seq, end.At, end.ID, end.Position)
	}
	return nil
}

// jump remembers the first sequence that was passed over.
func (r *reader) jump(from uint64) {
	if from == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.jumped == 0 || from < r.jumped {
		r.jumped = from
	}
}

var errMore = errors.New("the stream has more")

// nothingUpTo asks the stream's leader whether an event of this consumer is behind a position. A consumer's
// own count of pending messages lags.
func (r *reader) nothingUpTo(ctx context.Context, pos, end uint64) error {
	filters := r.definition.filters
	if len(filters) == 0 {
		filters = []string{""}
	}
	for _, filter := range filters {
		next, err := r.stream.Next(ctx, pos+1, filter)
		switch {
		case errors.Is(err, jetstream.ErrMessageGone):
		case err != nil:
			return err
		case next <= end:
			return errMore
		}
	}
	return nil
}

// missed looks for sequences that are gone and were not read. The reader passed over some, and the stream
// begins behind their first one now; or it begins behind the reader's position, and a second later still,
// although the reader does not wait for a queue.
func (r *reader) missed(first, pos, jumped uint64) error {
	if jumped > 0 && first > jumped {
		return r.gap(jumped, min(first-1, pos))
	}
	r.mu.Lock()
	suspected := r.suspect == pos+1
	if r.suspect = 0; first > pos+1 {
		r.suspect = pos + 1
	}
	if !suspected || first <= pos+1 || r.pos != pos || r.blocked {
		r.mu.Unlock()
		return nil
	}
	r.pos = first - 1
	r.mu.Unlock()
	return r.gap(pos+1, first-1)
}

// gap reports missing events. It returns ErrGap where the consumer is to stop.
func (c *consumer) gap(from, to uint64) error {
	c.metrics.gaps.Inc()
	advice := "raise the stream's limits; to go on without these events, set SkipGaps"
	err := fmt.Errorf("%w: stream %s, sequences %d to %d or some of them", ErrGap, c.Stream, from, to)
	c.Logger.Error("events are missing", "consumer", c.Name, "error", err, "hint", advice)
	if c.SkipGaps {
		return nil
	}
	return hint.Wrap(err, advice)
}
