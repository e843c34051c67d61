package drill

import (
	"context"
	"errors"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

// Run writes events, breaks the system, waits and counts. The report tells what is known, whatever the error.
func (d *Drill) Run(ctx context.Context) (*Report, error) {
	r := d.report
	r.Began, r.Outbox = time.Now().UTC(), d.Outbox()
	d.before, _ = d.cfg.Alarms(ctx)
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	d.watch = d.startWatch(watching)
	err := d.play(ctx)
	d.load.stop()
	if err != nil && ctx.Err() != nil {
		err = errors.New("the drill was interrupted")
	}
	r.EndedEarly = err != nil
	ending, limit := ctx, d.cfg.Patience
	if err != nil {
		ending, limit = context.WithoutCancel(ctx), min(limit, 10*time.Second)
	}
	ending, cancel := context.WithTimeout(ending, limit)
	defer cancel()
	err = errors.Join(err, d.finish(ending))
	stop()
	<-d.watch.done
	return r, err
}

// play is the drill up to where everything is stored, or patience ends.
func (d *Drill) play(ctx context.Context) error {
	d.load.start(ctx)
	if err := d.firstStored(ctx); err != nil {
		return err
	}
	half := d.cfg.For / 2
	d.cfg.Say("the fault comes in %s", half)
	if !sleep.For(ctx, half) {
		return ctx.Err()
	}
	if err := d.inject(ctx); err != nil {
		return err
	}
	if !sleep.For(ctx, half) {
		return ctx.Err()
	}
	d.load.stop()
	return d.settle(ctx)
}

// firstStored proves that the drill's events arrive, before anything is broken.
func (d *Drill) firstStored(ctx context.Context) error {
	if d.cfg.Rate == 0 {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, d.cfg.Patience)
	defer cancel()
	for d.watch.count() == 0 {
		if !sleep.For(limited, 50*time.Millisecond) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return hint.Errorf("look at `walpost status` and `walpost dlq list`: nats.subject, the "+
				"stream's subjects and the catalogue have to take the event type "+EventType+"; "+ownTraffic,
				"the drill's events do not arrive in stream %s: nothing was broken", d.report.Stream)
		}
	}
	return nil
}

func (d *Drill) inject(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, d.cfg.Patience)
	defer cancel()
	at := time.Now().UTC()
	d.report.Injected = &at
	err := d.cfg.Fault.Inject(limited, d)
	d.watch.injected(time.Now())
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return hint.Errorf("the steps say how far it came",
			"break the system: not within %s: %w", d.cfg.Patience, err)
	}
	return err
}
