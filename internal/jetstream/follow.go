package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

// FollowOptions say what is followed.
type FollowOptions struct {
	// From is the first sequence, one behind the stream's last at most.
	From uint64
	// Filters are the subjects, none of which overlaps another; without any it is all.
	Filters []string
	// Verify is called before the first message of each consumer that reads for Follow: one that was created
	// after a restore delivers what the restored stream has. After an error that consumer is not read, and
	// another one is tried. ErrNotTheStream ends Follow if it lasts. Verify may be nil.
	Verify func(context.Context) error
	// Most is how many messages are asked for at once, which may have to be in memory; 0 is 100.
	Most uint64
	// Waiting is called with the reason whenever nothing can be read, and with nil when it
	// goes on.
	Waiting func(error)
}

const (
	followMost = 100
	// followPatience is how long a stream may look gone or rolled back: a server that has
	// just started or been elected may not know better.
	followPatience = 5 * time.Second
	followPause    = 250 * time.Millisecond
)

// Follow calls each with the stream's messages from a sequence on as they are stored, in
// their order and each of them once, whatever restarts and whoever leads meanwhile. It
// changes nothing but a consumer of its own, which needs no acknowledgements and is
// deleted in the end, or vanishes half a minute later.
//
// It returns nil when ctx is done, and the error of each. What is wrong at first is an
// error; afterwards it waits without end, except where permissions were taken away, the
// connection is closed for good, or the stream is gone, is another one, or has lost what
// was followed already.
//
// The client's ordered consumer is not used: see [Stream.fetch] and [Stream.consume].
func (s *Stream) Follow(ctx context.Context, o FollowOptions, each func(Received) error) error {
	f := follower{Stream: s, o: o, each: each, next: max(o.From, 1)}
	var doubtful time.Time // since when the stream looks as it should not
	for {
		err := f.session(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case f.refused != nil:
			return f.refused
		case !f.began, errors.Is(err, nats.ErrPermissionViolation), errors.Is(err, nats.ErrConnectionClosed):
			return err
		case !errors.Is(err, ErrStreamNotFound) && !errors.Is(err, ErrNotTheStream):
			doubtful = time.Time{}
		case doubtful.IsZero():
			doubtful = time.Now()
		case time.Since(doubtful) > followPatience:
			return err
		}
		if f.alive {
			f.alive = false // it may go on at once
			continue
		}
		if !s.nc.IsConnected() {
			err = nats.ErrDisconnected
		}
		f.waiting = true
		f.o.Waiting(err)
		if !sleep.For(ctx, followPause) {
			return nil
		}
	}
}

// ErrNotTheStream means that the stream is another one of the same name, or an older state of it.
var ErrNotTheStream = errors.New("not the stream that was followed")

type follower struct {
	*Stream
	o       FollowOptions
	each    func(Received) error
	created time.Time
	refused error  // by each
	next    uint64 // sequence
	// began: some session had its consumer; alive: the last one got word from it.
	began, alive, waiting bool
}

// session follows by one consumer, until that fails.
func (f *follower) session(ctx context.Context) error {
	if err := f.check(ctx); err != nil {
		return err
	}
	cfg := jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: f.next,
	}
	if len(f.o.Filters) == 1 {
		cfg.FilterSubject = f.o.Filters[0]
	} else {
		cfg.FilterSubjects = f.o.Filters
	}
	consumer, done, err := f.consumer(ctx, cfg)
	if err != nil {
		return f.explain("follow", "CONSUMER.CREATE", err)
	}
	defer done()
	if f.o.Verify != nil {
		if err := f.o.Verify(ctx); err != nil {
			return err
		}
	}
	f.began = true
	delivered := uint64(0)
	// A request ends by the server's word, never by a pause: what is sent to one that was
	// given up would be lost to this consumer.
	p := pull{
		consumer: consumer, most: cmp.Or(f.o.Most, followMost), idle: 2 * fetchTimeout, alive: f.heard,
	}
	for {
		err := f.fetch(ctx, p, func(msg *nats.Msg) (more bool, err error) {
			meta, err := msg.Metadata()
			if err != nil {
				return false, err
			}
			if delivered++; meta.Sequence.Consumer != delivered {
				return false, silent("its message %d", delivered)
			}
			if f.refused = f.each(received(msg, meta)); f.refused != nil {
				return false, f.refused
			}
			f.next = meta.Sequence.Stream + 1
			return true, nil
		})
		if err != nil {
			return f.explain("follow", "CONSUMER.MSG.NEXT", err)
		}
	}
}

// check asks whether the stream is the one that was followed.
func (f *follower) check(ctx context.Context) error {
	info, err := f.Info(ctx)
	if err != nil {
		return err
	}
	if f.created.IsZero() {
		f.created = info.Created
	}
	const advice = "start it again, with --since to see what came meanwhile"
	switch {
	case !info.Created.Equal(f.created):
		return hint.Errorf(advice, "follow stream %s: %w: it was created at %s",
			f.cfg.Name, ErrNotTheStream, info.Created.UTC().Format(time.RFC3339))
	case info.LastSeq+1 < f.next:
		return hint.Errorf(advice, "follow stream %s: %w: it ends at sequence %d, and %d was there already",
			f.cfg.Name, ErrNotTheStream, info.LastSeq, f.next-1)
	}
	return nil
}

func (f *follower) heard() {
	f.alive = true
	if f.waiting {
		f.waiting = false
		f.o.Waiting(nil)
	}
}

// ExplainFollow names every permission that Follow needs, and not only the first that is missing.
func (s *Stream) ExplainFollow(err error) error {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return err
	}
	name := s.cfg.Name
	return hint.Wrap(err, fmt.Sprintf("let the user publish on %s, %s, %s and %s, and subscribe to %s",
		s.APISubject("STREAM.INFO."+name), s.APISubject("CONSUMER.CREATE."+name+".>"),
		s.APISubject("CONSUMER.MSG.NEXT."+name+".>"), s.APISubject("CONSUMER.DELETE."+name+".>"),
		s.inboxes()))
}
