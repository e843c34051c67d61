package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// runSeed makes one run.
func runSeed(ctx context.Context, o *options, seed uint64) *result {
	r := &result{Seed: seed, Faults: map[string]int{}, Recoveries: map[string][]time.Duration{}}
	begun := time.Now()
	defer func() { r.Took = time.Since(begun) }()
	log := func(format string, args ...any) {
		if o.verbose {
			fmt.Fprintf(os.Stderr, "%8.3f %s\n", time.Since(begun).Seconds(), fmt.Sprintf(format, args...))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Minute)
	defer cancel()
	p, err := draw(rand.New(rand.NewPCG(seed, 1)))
	if o.batch != "" {
		p.batch = o.batch
	}
	if o.mark != "" {
		p.mark = o.mark
	}
	if err == nil && o.mutant != nil {
		o.mutant.world(&p)
	}
	if err == nil && o.possible != nil {
		r.Case = o.possible.name
		o.possible.world(&p)
	}
	r.Servers = p.String()
	log("%s", r.Servers)
	var program string
	if err == nil {
		program, err = relayProgram(ctx, o.mutant)
	}
	var w *world
	if err == nil {
		w, err = newWorld(ctx, p, program, log)
	}
	if err != nil {
		r.Failure = err.Error()
		return r
	}
	w.patience = o.patience
	if c := o.possible; c != nil {
		err = w.playCase(ctx, c, o, r)
	} else {
		err = w.play(ctx, o, r)
	}
	if err != nil {
		r.Failure = err.Error()
	}
	for _, relay := range w.relays {
		r.Restarts += relay.starts - 1
	}
	if err := w.close(); err != nil && r.Failure == "" {
		r.Failure = err.Error()
	}
	return r
}

func (w *world) play(ctx context.Context, o *options, r *result) (err error) {
	defer func() {
		if err != nil || !r.ok() {
			w.keepLogs(o, r)
		}
	}()
	if err := w.exec(ctx, schemaSQL); err != nil {
		return err
	}
	observer := w.observe(ctx, r.Seed)
	defer func() {
		observer.finish(r)
		for _, relay := range w.relays {
			r.Peak = max(r.Peak, relay.peak.Load())
		}
		alarms, aerr := w.countAlarms()
		r.Alarms = alarms
		err = errors.Join(err, aerr)
	}()
	writing, stop := context.WithCancel(ctx)
	defer stop()
	l := w.startLoad(writing, r.Seed, o.rows)
	l.writing.Go(func() { l.requestReplays(writing, rand.New(rand.NewPCG(r.Seed, 4))) })
	b := &breaking{w: w, rng: rand.New(rand.NewPCG(r.Seed, 2)), result: r}
	if o.only != "" {
		b.only = strings.Split(o.only, ",")
	}
	sleep.For(ctx, time.Second)
	if err := b.run(ctx, o.faults); err != nil {
		stop()
		l.finish()
		return errors.Join(err, w.check(ctx, r))
	}
	w.log("all is mended")
	// The load goes on until enough of it was observed.
	observer.tell(r)
	for since := time.Now(); r.blind() && time.Since(since) < w.patience; {
		if !sleep.For(ctx, 100*time.Millisecond) {
			break
		}
		observer.tell(r)
	}
	l.finish()
	if r.Pending, err = w.settled(ctx); err != nil {
		for _, relay := range w.relays {
			relay.dump()
		}
		return err
	}
	if err := w.replaysEnd(ctx); err != nil {
		return err
	}
	// Whoever would store something twice does it now.
	sleep.For(ctx, 2*time.Second)
	if err := w.check(ctx, r); err != nil {
		return err
	}
	return w.agree(ctx, r)
}

// keepLogs saves what the relays said, and shows the end of it.
func (w *world) keepLogs(o *options, r *result) {
	for i, relay := range w.relays {
		text, err := os.ReadFile(relay.log)
		if err != nil {
			continue
		}
		if o.keep != "" {
			name := filepath.Join(o.keep, fmt.Sprintf("%d-relay-%d.log", r.Seed, i))
			if err := errors.Join(os.MkdirAll(o.keep, 0o755), os.WriteFile(name, text, 0o644)); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
		text, _, _ = bytes.Cut(text, []byte("SIGQUIT: quit"))
		if len(text) > 6000 {
			text = text[len(text)-6000:]
		}
		r.Details = fmt.Sprintf("\nrelay %d ends:\n%s\n", i, text) + r.Details
	}
}
