package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/stream"
)

// beside is a rig of the same database with another slot.
func (r *rig) beside(slot string) *rig {
	r.t.Helper()
	other := *r
	other.cfg.Slot += slot
	r.t.Cleanup(func() { r.dropSlot(other.cfg.Slot) })
	return &other
}

// toOther has a rig deliver to a stream of its own.
func (r *rig) toOther() *rig {
	r.cfg.Stream.Name, r.cfg.Stream.Pattern, r.cfg.Subject = "OTHER", "other.>", "other.{event_type}"
	return r
}

// deliversBeside waits until one relay delivers and the other one waits for it, and both say so.
func (waits *running) deliversBeside(delivers *running) {
	t := waits.rig.t
	t.Helper()
	said := fmt.Sprint(waits.alarmed("outbox_shared"))
	for _, want := range []string{delivers.rig.cfg.Slot, delivers.rig.cfg.Stream.Name, "walpost", "WAL", "mirror"} {
		if !strings.Contains(said, want) {
			t.Errorf("the alarm does not say %s: %s", want, said)
		}
	}
	delivers.alarmed("outbox_shared")
	s := waits.Status()
	if s.State != "standby" || waits.Ready() != nil || !strings.Contains(s.LastError, delivers.rig.cfg.Slot) {
		t.Errorf("ready: %v, status: %+v", waits.Ready(), s)
	}
}

// numbersIn are the sorted numbers of the messages of streams, all together.
func (r *rig) numbersIn(streams ...string) (all []int) {
	r.t.Helper()
	for _, name := range streams {
		all = append(all, numbersOf(r.t, readStream(r.t, r.nats.URL(), name))...)
	}
	slices.Sort(all)
	return all
}

// TestOutboxOfTwoRelays: of two relays that would deliver the same rows the second waits, and delivers when the first has
// stopped: each row is in one stream, once. That is also a rolling deployment that changes the slot.
func TestOutboxOfTwoRelays(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(first, second *rig){
		"another stream": func(_, second *rig) { second.toOther() },
		"another stream, both poll": func(first, second *rig) {
			second.toOther()
			first.cfg.Mode, second.cfg.Mode = relay.ModePoll, relay.ModePoll
		},
		"another stream, the first polls": func(first, second *rig) { second.toOther(); first.cfg.Mode = relay.ModePoll },
		"another source":                  func(_, second *rig) { second.toOther(); second.cfg.Source = "another" },
		"a shared stream": func(first, second *rig) {
			first.cfg.Stream.Shared, first.cfg.Stream.Pattern, first.cfg.Stream.Batching = true, "events.>", ""
			second.cfg.Stream = first.cfg.Stream
		},
		"the same stream": func(_, _ *rig) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := newRig(t, testenv.SharedPostgres(t))
			second := first.beside("_b")
			first.createStream(nil)
			first.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
			change(first, second)
			b := second.startAtWork() // its slot keeps WAL from now on
			first.put(1, 10)
			first.pending(0)
			b.halt()

			a := first.startAtWork()
			b = second.start()
			b.deliversBeside(a)
			if found := second.examine(); !strings.Contains(found, "warn outbox-shared") {
				t.Errorf("doctor of the one that waits finds %s", found)
			}
			if found := first.examine(); strings.Contains(found, "outbox-shared") {
				t.Errorf("doctor of the one that delivers finds %s", found)
			}
			first.put(11, 2010)
			first.pending(0)
			a.halt()
			first.put(2011, 2050)
			first.pending(0)
			b.over("outbox_shared")
			if second.cfg.Mode != relay.ModePoll {
				second.passes(first.here())
			}
			a = first.start()
			a.deliversBeside(b)
			b.halt()
			a.over("outbox_shared")
			first.put(2051, 2060)
			first.pending(0)
			if first.cfg.Mode != relay.ModePoll {
				first.passes(first.here())
			}
			if got := first.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, 2060)) {
				t.Errorf("stored %d messages %s", len(got), brief(got))
			}
			a.quietBut()
			b.quietBut()
			b.quiet("rival")
		})
	}
}

// TestPartsOfAnOutbox: which parts of an outbox relays deliver beside each other.
func TestPartsOfAnOutbox(t *testing.T) {
	t.Parallel()
	type part struct {
		where string
		shard outbox.Shard
	}
	shard := func(index, of int) part { return part{shard: outbox.Shard{Index: index, Of: of}} }
	where := func(of string) part { return part{where: fmt.Sprintf("event_type = 'order.%s'", of)} }
	for name, x := range map[string]struct {
		first, second part
		waits         bool
	}{
		"shards of one set":                {shard(1, 2), shard(2, 2), false},
		"shards of two sets":               {shard(1, 2), shard(2, 3), true},
		"a shard beside everything":        {part{}, shard(2, 3), true},
		"halves and quarters, disjoint":    {shard(1, 2), shard(2, 4), false},
		"halves and quarters, overlapping": {shard(1, 2), shard(3, 4), true},
		"the same where":                   {where("placed"), where("placed"), true},
		"another where":                    {where("placed"), where("paid"), false},
		"a where beside everything":        {part{}, where("paid"), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode, r.cfg.FallbackInterval = relay.ModePoll, 200*time.Millisecond
			first, second := r.beside("_a"), r.beside("_b").toOther()
			first.fit(x.first.where, x.first.shard)
			second.fit(x.second.where, x.second.shard)
			a := first.startAtWork()
			b := second.start()
			if x.waits {
				b.deliversBeside(a)
			} else {
				eventually(t, "both deliver", func() bool { return b.Status().State == "polling" })
			}
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', n % 20, CASE n % 3 WHEN 0 THEN 'order.placed' ELSE 'order.paid' END, jsonb_build_object('n', n)
				FROM generate_series(1, 600) n ORDER BY n`)
			marked := `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`
			eventually(t, "the first one has delivered its part", func() bool { return first.partPending() == 0 })
			if !x.waits {
				eventually(t, "the second one has delivered its part, too", func() bool { return second.partPending() == 0 })
			} else if n := len(r.numbersIn("OTHER")); n > 0 {
				t.Errorf("the second one has delivered %d messages", n)
			}
			a.halt()
			if x.waits {
				b.over("outbox_shared")
			}
			eventually(t, "the second one has delivered its part", func() bool { return second.partPending() == 0 })
			b.halt()
			got := append(r.numbersIn("EVENTS"), r.numbersIn("OTHER")...)
			slices.Sort(got)
			if n := len(slices.Compact(slices.Clone(got))); n != len(got) || n != r.count(marked) {
				t.Errorf("%d messages of %d rows, of which %d are marked", len(got), n, r.count(marked))
			}
		})
	}
}

// TestRelaysBeginTogether: of relays that begin at the same moment one delivers.
func TestRelaysBeginTogether(t *testing.T) {
	t.Parallel()
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(nil)
			r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
			r.exec(stream.PublicationSQL(r.cfg.Publication, r.cfg.Outboxes))
			r.put(1, 500)
			all := []*running{r.start(), r.beside("_b").toOther().start(), r.beside("_c").start()}
			eventually(t, "one delivers and two wait", func() bool {
				states := map[string]int{}
				for _, x := range all {
					states[x.Status().State]++
				}
				return states["streaming"] == 1 && states["standby"] == 2
			})
			r.pending(0)
			r.put(501, 600)
			r.pending(0)
			var streams []string
			for _, x := range all {
				if x.Status().State == "streaming" {
					streams = append(streams, x.rig.cfg.Stream.Name)
				} else {
					x.alarmed("outbox_shared")
				}
			}
			if got := r.numbersIn(streams...); !slices.Equal(got, span(1, 600)) {
				t.Errorf("stored in %s: %d messages %s", streams, len(got), brief(got))
			}
		})
	}
}

// TestDelivererIsCut: the relay that delivers is killed, or loses its connection. A relay that waits takes over, and each row is
// stored once.
func TestDelivererIsCut(t *testing.T) {
	t.Parallel()
	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, testenv.SharedPostgres(t))
		r.createStream(nil)
		p := r.launch().awaitState("streaming")
		second := r.beside("_b")
		x := second.start()
		x.alarmed("outbox_shared")
		for n := range 40 {
			if n == 20 {
				p.kill()
			}
			r.put(50*n+1, 50*n+50)
		}
		x.streaming().over("outbox_shared")
		r.pending(0)
		second.passes(r.here())
		if got := r.numbersIn("EVENTS"); !slices.Equal(got, span(1, 2000)) {
			t.Errorf("stored %d messages %s", len(got), brief(got))
		}
	})
	t.Run("cut", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, testenv.SharedPostgres(t))
		both := []*running{r.start(), r.beside("_b").start()}
		delivers := func() bool {
			return slices.ContainsFunc(both, func(x *running) bool { return x.Status().State == "streaming" })
		}
		for n := range 40 {
			r.put(50*n+1, 50*n+50)
			if n%10 == 9 {
				eventually(t, "one of them delivers", delivers)
				r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = current_database() AND application_name = 'walpost' AND pid IN (
						SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1)`)
			}
		}
		r.pending(0)
		eventually(t, "one of them delivers", delivers)
		r.put(2001, 2001)
		r.pending(0)
		if got := r.numbersIn("EVENTS"); !slices.Equal(got, span(1, 2001)) {
			t.Errorf("stored %d messages %s", len(got), brief(got))
		}
	})
}

// TestCrashedRelayWaits: a relay has crashed and is there again when the one that takes over notes its begin. What that one
// delivers is not delivered again.
func TestCrashedRelayWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(nil)
	other := r.beside("_b").toOther()
	other.start().streaming().halt()
	p := r.launch().awaitState("streaming")
	r.put(1, 10)
	r.pending(0)
	y := other.start()
	y.alarmed("outbox_shared")
	lock := r.conn()
	r.must(run(t.Context(), lock, `BEGIN; SELECT FROM outbox_sent FOR UPDATE`))
	p.kill()
	y.over("outbox_shared")
	x := r.start()
	x.alarmed("outbox_shared")
	r.must(run(t.Context(), lock, `ROLLBACK`))
	y.streaming()
	r.put(11, 500)
	r.pending(0)
	y.halt()
	r.put(501, 510)
	r.pending(0)
	r.passes(r.here())
	if got := r.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, 510)) {
		t.Errorf("stored %d messages %s", len(got), brief(got))
	}
}

// TestOnceBesideARelay: a relay that runs once ends where another one delivers its rows.
func TestOnceBesideARelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming()
	other := r.beside("_b").toOther()
	other.cfg.Once = true
	x := other.start()
	x.ends()
	if x.err == nil || !strings.Contains(x.err.Error(), r.cfg.Slot) || !strings.Contains(hint.Of(x.err), "mirror") {
		t.Errorf("it ends with %v (%s)", x.err, hint.Of(x.err))
	}
}

// partPending counts the pending rows of the rig's part of the outbox.
func (r *rig) partPending() int {
	r.t.Helper()
	o := r.cfg.Outboxes[0]
	sql := `SELECT count(*) FROM outbox_messages t WHERE processed_at IS NULL`
	if shard := o.ShardSQL("t"); shard != "" {
		sql += " AND " + shard
	}
	if o.Where != "" {
		sql += " AND " + o.Where
	}
	return r.count(sql)
}
