package drill

import (
	"context"
	"fmt"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
)

// finish counts what became of the events, and compares tables and stream.
func (d *Drill) finish(ctx context.Context) error {
	r := d.report
	err := d.count(ctx)
	if err != nil {
		err = fmt.Errorf("count the drill's events: %w", err)
	}
	if !r.EndedEarly {
		d.cfg.Say("comparing the tables with the stream")
		var verr error
		if r.Verify, verr = d.cfg.Verify(ctx, r.Began.Add(-time.Second)); verr != nil && err == nil {
			err = fmt.Errorf("verify: %w", verr)
		}
	}
	d.countAlarms(ctx)
	r.Took = seconds(time.Since(r.Began))
	r.judge()
	r.Incomplete = err != nil || r.EndedEarly
	r.OK = r.OK && !r.Incomplete
	return err
}

// count holds the stream, as it is now, against the events whose commits were answered.
func (d *Drill) count(ctx context.Context) error {
	messages, err := d.messages(ctx)
	if err != nil { // what was seen says nothing of what is lost
		e := &d.report.Events
		e.Committed, e.Stored = len(d.load.written()), d.watch.count()
		e.Pending = max(0, e.Committed-e.Stored)
		return err
	}
	c := counting{d: d, events: d.load.written()}
	c.see(messages)
	row := map[int]string{}
	for _, m := range messages {
		row[m.n] = m.ID.ID
	}
	for i, e := range c.events {
		if e.doubtful {
			c.events[i].id = row[e.n]
		}
	}
	err = c.findRows(ctx)
	if err == nil && c.misses() { // a row that was settled between the two looks has its message by now
		if messages, err = d.messages(ctx); err == nil {
			c.see(messages)
		}
	}
	if err != nil { // they wait, or are lost: nothing tells
		for _, e := range c.events {
			c.pending[e.n] = !c.stored[e.n]
		}
	}
	c.compare()
	c.times()
	return err
}

// messages are the drill's that the stream has now, in its order.
func (d *Drill) messages(ctx context.Context) (own []message, err error) {
	var all []jetstream.Message
	for { // a server that has only started may not answer yet
		all = all[:0]
		info, err := d.cfg.Stream.Info(ctx)
		if err == nil {
			err = d.cfg.Stream.ScanForward(ctx, d.first, info.LastSeq, jetstream.ScanOptions{
				Source: d.cfg.Source,
				Step: func(some []jetstream.Message) (bool, error) {
					all = append(all, some...)
					return true, ctx.Err()
				},
			})
		}
		if err == nil {
			break
		}
		if !sleep.For(ctx, 500*time.Millisecond) {
			return nil, err
		}
	}
	if len(all) > 0 {
		if err := d.watch.reach(ctx, all[len(all)-1].Seq); err != nil {
			return nil, err
		}
	}
	d.watch.mu.Lock()
	defer d.watch.mu.Unlock()
	for _, m := range all {
		if n, is := d.watch.own[m.ID]; is {
			own = append(own, message{m, n})
		}
	}
	return own, nil
}

// message is one of the event n.
type message struct {
	jetstream.Message
	n int
}
