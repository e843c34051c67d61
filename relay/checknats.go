package relay

import (
	"context"
	"errors"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
)

func (x *checker) checkNATS(ctx context.Context) (f check.Findings) {
	err := x.connect(ctx)
	x.reached = err == nil
	f.Failed(check.Error, "nats-unreachable", err)
	return f
}

func (x *checker) checkStream(ctx context.Context) (f check.Findings) {
	if !x.reached {
		return nil
	}
	info, found, err := x.stream.Check(ctx)
	x.sayWeaknesses(found)
	missing := errors.Is(err, jetstream.ErrStreamNotFound)
	if err != nil && len(found) == 0 && !missing {
		f.Failed(check.Error, "stream-unreadable", err)
		return f
	}
	x.info, x.asked = info, true
	if missing {
		return x.checkMissing(ctx, err)
	}
	if err == nil {
		x.created = info.Created
	}
	return found.About("stream " + x.cfg.Stream.Name)
}

func (x *checker) checkMissing(ctx context.Context, missing error) (f check.Findings) {
	if x.cfg.CreateStream && !x.whole() && x.aside == nil {
		// The tables know whether it may be created.
		f.Failed(check.Warn, "stream-missing", hint.Wrap(missing,
			"correct the errors of the tables first: a start then creates the stream, unless rows are "+
				"marked as delivered already"))
		return f
	}
	err := x.mayCreateStream(ctx, missing)
	x.creates = err == nil
	f.Failed(check.Error, "table-unreadable", err)
	return f
}

func (x *checker) checkWriter(ctx context.Context) check.Findings {
	if x.info == nil || !x.named {
		return nil
	}
	found := x.stream.WriterFindings(ctx, x.info, x.envelope.Source())
	return found.About("stream " + x.cfg.Stream.Name)
}

// checkCreatable: a start learns it from creating the stream.
func (x *checker) checkCreatable(ctx context.Context) (f check.Findings) {
	if !x.creates {
		return nil
	}
	if err := x.stream.MayCreate(ctx); err != nil {
		x.creates = false
		f.Failed(check.Error, "stream-unreadable", err)
		return f
	}
	f.Note("stream-missing", "", "stream %s does not exist: a start creates it", x.cfg.Stream.Name)
	return f
}

func (x *checker) checkPermissions(ctx context.Context) check.Findings {
	if !x.asked {
		return nil
	}
	return x.stream.Examine(ctx, x.info)
}
