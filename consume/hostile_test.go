package consume_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// TestLargeHeaders: a publisher's events have large headers, and the handler is slow. What waits in memory is bounded.
func TestLargeHeaders(t *testing.T) {
	r := rigOn(t, testenv.SharedPostgres(t), testenv.NATSOptions{Process: true})
	const events, header = 2000, 50_000
	for i := range events {
		m := message(fmt.Sprint(i), "1", "order.placed")
		m.Header.Set("X", strings.Repeat("x", header))
		r.must(r.nc.PublishMsg(m))
	}
	r.must(r.nc.Flush())
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, most := heap(), uint64(0)
	cfg := r.config()
	cfg.Partitions = 1
	entered, leave := make(chan struct{}), make(chan struct{})
	r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "0" && e.Attempt == 1 {
			close(entered)
			<-leave
		}
		return effect(ctx, tx, e)
	})
	<-entered
	eventually(t, func() string { return "the queue is full" }, func() bool {
		grown := heap() - min(before, heap())
		full := most > 0 && grown <= most
		most = max(most, grown)
		return full
	})
	close(leave)
	r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(events))
	t.Logf("the heap has grown by %d MiB", most>>20)
	if most > events*header {
		t.Errorf("the heap has grown by %d MiB, at most %d are to wait", most>>20, 16)
	}
}

// TestManyEventTypes: a publisher's events have a type each. The metrics have 200 of them.
func TestManyEventTypes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for i := range 300 {
		m := message(fmt.Sprint(i), "1", fmt.Sprintf("type%d", i))
		if i%3 == 0 {
			m.Header["ce-type"] = []string{strings.Repeat("long", 30) + fmt.Sprint(i)}
		}
		r.must(r.nc.PublishMsg(m))
	}
	for i := range 100 {
		r.must(r.nc.PublishMsg(&nats.Msg{Subject: "events.x", Header: nats.Header{"ce-type": {fmt.Sprintf("more%d", i)}}}))
	}
	r.must(r.nc.Flush())
	r.run(r.config(), func(context.Context, pgx.Tx, consume.Event) error { return nil })
	eventually(t, func() string { return "all are handled" }, func() bool { return r.metric("consumer_processed_total") == 400 })
	families, err := r.metrics.Gather()
	r.must(err)
	for _, f := range families {
		if n := len(f.GetMetric()); n > 201 {
			t.Errorf("%s has %d series", f.GetName(), n)
		}
	}
}
