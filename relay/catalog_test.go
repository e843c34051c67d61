package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// catalogue allows events with numbers up to a greatest one.
func (r *rig) catalogue(greatest int, parkUnknown bool) {
	r.t.Helper()
	events, err := catalog.Load(fstest.MapFS{"orders.yaml": {Data: fmt.Appendf(nil, `
name: order.placed
version: 1
owner: shop
description: d
replay: safe
schema: {type: object, properties: {n: {type: integer, maximum: %d}}}`, greatest)}})
	r.must(err)
	r.cfg.Check = func(ev *outbox.Event) error { return events.CheckEvent(ev, parkUnknown) }
}

// TestRowThatDoesNotFitTheCatalogue: in both modes it is parked with its class and the path of what does not fit,
// and holds its aggregate, while others flow. With a mended catalogue the next try delivers it, in its place. A row
// that never fits becomes a dead letter, and a retry delivers it once the catalogue takes it.
func TestRowThatDoesNotFitTheCatalogue(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode, r.cfg.FallbackInterval = mode, 100*time.Millisecond
			r.cfg.Retry = table.Retry{Backoff: 300 * time.Millisecond, MaxAttempts: 1000}
			r.catalogue(100, false)
			x := r.start().working(mode)
			r.put(1, 3)
			r.exec(putSQL, "order.placed", 101, 101)
			r.put(5, 7)
			r.exec(strings.Replace(putSQL, "1, $1", "2, $1", 1), "order.placed", 8, 9)
			r.exec(strings.Replace(putSQL, "1, $1", "3, $1", 1), "payment.made", 200, 200) // the catalogue does not have it
			r.pending(0)
			recorded := func() string {
				return r.query1(`SELECT string_agg(concat_ws('|', payload ->> 'n', attempts > 0, last_error), ', ') FROM outbox_messages
					WHERE last_error IS NOT NULL AND payload ->> 'n' = '101'`)
			}
			want := "101|t|schema: order.placed version 1: /n: it does not fit maximum"
			eventually(t, "the row is parked", func() bool { return recorded() == want })
			if held := r.count(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL AND processed_at IS NULL`); held != 4 {
				t.Errorf("%d rows are parked or held, want 4", held)
			}
			r.storedSet(1, 3, 8, 9, 200, 200)
			if n := x.metric("outbox_failures_total", "class", "schema"); n < 1 {
				t.Errorf("outbox_failures_total of class schema is %v", n)
			}
			x.halt()

			r.catalogue(150, false)
			x = r.start().working(mode)
			eventually(t, "the rows are delivered", func() bool { return r.unmarked() == 0 })
			r.storedSet(1, 3, 5, 9, 101, 101, 200, 200)
			var aggregate []int
			for _, n := range r.numbers() {
				if n < 8 || n == 101 {
					aggregate = append(aggregate, n)
				}
			}
			if want := span(1, 3, 101, 101, 5, 7); !slices.Equal(aggregate, want) {
				t.Errorf("of the aggregate %s are stored in this order, want %s", brief(aggregate), brief(want))
			}
			x.halt()

			r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
			x = r.start().working(mode)
			r.exec(putSQL, "order.placed", 300, 300)
			eventually(t, "the row is a dead letter", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
			if got := r.query1(`SELECT last_error FROM outbox_messages_dlq`); got != "schema: order.placed version 1: /n: it does not fit maximum" {
				t.Errorf("the dead letter says %q", got)
			}
			x.halt()
			r.catalogue(300, true)
			x = r.start().working(mode)
			r.retryAll()
			r.exec(strings.Replace(putSQL, "1, $1", "3, $1", 1), "payment.made", 201, 201)
			eventually(t, "the unknown type is a dead letter", func() bool {
				return r.query1(`SELECT coalesce(string_agg(last_error, ', '), '') FROM outbox_messages_dlq`) == `schema: "payment.made": the catalogue does not have it`
			})
			eventually(t, "the retried row is stored", func() bool { return r.unmarked() == 0 })
			r.storedSet(1, 3, 5, 9, 101, 101, 200, 200, 300, 300)
			x.quiet("missed_rows")
		})
	}
}

// working waits until the relay delivers in its mode.
func (x *running) working(mode relay.Mode) *running {
	x.rig.t.Helper()
	if mode != relay.ModePoll {
		return x.streaming()
	}
	eventually(x.rig.t, "the relay polls", func() bool { return x.Status().State == "polling" })
	return x
}

// storedSet compares what is stored, in any order.
func (r *rig) storedSet(ranges ...int) {
	r.t.Helper()
	got, want := r.numbers(), span(ranges...)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		r.t.Errorf("stored %s, want %s", brief(got), brief(want))
	}
}
