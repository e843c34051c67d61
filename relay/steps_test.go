package relay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestSlowStepIsSaid: what a relay hangs at is in its log and in its status, and it is
// not ready meanwhile.
func TestSlowStepIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		r := &Relay{reporter: newReporter(zap.New(core), nil), servers: &servers{cfg: &Config{}}}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go r.watchSteps(ctx)
		r.status.set(statePolling, nil)
		time.Sleep(time.Hour)
		if logs.Len() != 0 || r.Ready() != nil {
			t.Errorf("%d warnings while it polls, ready: %v", logs.Len(), r.Ready())
		}
		for range 10 {
			r.status.do("another step")
			time.Sleep(50 * time.Second)
		}
		if logs.Len() != 0 {
			t.Errorf("%d warnings about quick steps", logs.Len())
		}
		r.status.do("read the stream back")
		time.Sleep(5 * time.Minute)
		said := logs.FilterMessageSnippet("takes long").All()
		if len(said) < 3 || len(said) > 5 || said[0].ContextMap()["step"] != "read the stream back" {
			t.Errorf("warnings in five minutes: %v", said)
		}
		if err := r.Ready(); err == nil || err.Error() != "waiting: read the stream back" {
			t.Errorf("ready: %v", err)
		}
		r.status.set(statePolling, nil)
		begun := time.Now()
		for range 5 * 60 {
			r.status.meanwhile("make the slot", begun)
			time.Sleep(time.Second)
		}
		if n := logs.FilterMessageSnippet("polled meanwhile").FilterField(zap.String("step", "make the slot")).Len(); n < 3 || n > 5 {
			t.Errorf("%d warnings in five minutes of making the slot", n)
		}
		if s := r.Status(); s.Step != "make the slot" || r.Ready() != nil {
			t.Errorf("step %q, ready: %v", s.Step, r.Ready())
		}
		r.status.set(stateStreaming, nil)
		r.status.meanwhile("make the slot", begun)
		said = logs.All()
		time.Sleep(time.Hour)
		if logs.Len() != len(said) || r.Status().Step != "" {
			t.Errorf("%d warnings, step %q after the step", logs.Len()-len(said), r.Status().Step)
		}
	})
}

// TestStandbyEnds: a relay that stood by is ready again only when it delivers.
func TestStandbyEnds(t *testing.T) {
	r := &Relay{reporter: newReporter(nil, nil), servers: &servers{cfg: &Config{}}}
	r.status.set(stateStandby, nil)
	if err := r.Ready(); err != nil {
		t.Errorf("it stands by, and is not ready: %v", err)
	}
	r.status.own()
	if err := r.Ready(); err == nil || err.Error() != "waiting" {
		t.Errorf("it owns the lock and delivers nothing yet, ready: %v", err)
	}
	ctx, end := context.WithCancel(t.Context())
	r.status.deliver(ctx, stateStreaming)
	r.status.own()
	if err := r.Ready(); err != nil {
		t.Errorf("it streams, and is not ready: %v", err)
	}
	end()
	r.status.do("settle what was sent")
	r.status.deliver(ctx, stateStreaming)
	if r.Ready() == nil {
		t.Error("the session has ended, and it is ready")
	}
	r.status.failing(errors.New("no answer"))
	if err := r.Ready(); err == nil || err.Error() != "waiting: settle what was sent: no answer" {
		t.Errorf("what fails is not said: %v", err)
	}
}
