package relay_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestOutboxOutAndBackIn: rows of an outbox are stored and not marked when the relay ends. Sessions without the outbox store
// more messages than a read-back looks at. With the outbox again, no row is stored twice.
func TestOutboxOutAndBackIn(t *testing.T) {
	t.Parallel()
	for _, name := range testenv.Some(t, 1, "stopped", "killed", "stopped, alone", "killed, nothing remembers, alone", "stopped, narrower", "stopped twice") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.addSecond()
			both := r.cfg.Outboxes
			r.start().streaming().halt()
			again, others := both, 3*jetstream.U+1000 // the rows of the newest U ask for one step more
			if strings.HasSuffix(name, "alone") {
				again, others = both[:1], jetstream.U+1000
			}
			if strings.Contains(name, "nothing remembers") {
				r.exec(`DROP TABLE outbox_sent`)
			}
			r.put(1, 20)
			r.cfg.Outboxes = both[:1]
			if strings.HasPrefix(name, "killed") {
				r.launch("WALPOST_CRASH=stored:1").crashed("stored")
			} else {
				ctx, lock := t.Context(), r.conn()
				r.must(run(ctx, lock, `BEGIN; SELECT FROM outbox_messages FOR UPDATE`))
				x := r.start()
				eventually(t, "the rows are stored", func() bool { return r.storedCount() == 20 })
				x.halt()
				r.must(run(ctx, lock, `ROLLBACK`))
			}
			if n := r.unmarked(); n != 20 {
				t.Fatalf("%d rows are not marked, want 20", n)
			}

			r.cfg.Outboxes = both[1:]
			x := r.start().streaming()
			r.putSecond(1, others)
			x.halt()

			r.cfg.Outboxes = again
			if strings.HasSuffix(name, "narrower") {
				r.fit("event_type = 'order.placed'", outbox.Shard{})
				r.cfg.Outboxes = append(r.cfg.Outboxes, both[1])
			}
			if strings.HasSuffix(name, "twice") { // what it has read back cannot be marked either
				ctx, lock := t.Context(), r.conn()
				r.must(run(ctx, lock, `BEGIN; SELECT FROM outbox_messages FOR UPDATE`))
				x := r.start()
				eventually(t, "the session has noted its begin", func() bool {
					return r.count(`SELECT count(*) FROM outbox_sent WHERE outbox = 'public.outbox_messages' AND read_sequence > 20`) == 1
				})
				x.halt()
				r.must(run(ctx, lock, `ROLLBACK`))
			}
			x = r.start().streaming()
			r.put(21, 21)
			r.pending(0)
			if n := r.storedCount(); n != uint64(21+others) {
				t.Errorf("%d messages are stored, want %d", n, 21+others)
			}
			x.quietBut("slot_shared")
		})
	}
}

// TestAwayAndBack: what another relay has delivered, or this one to another stream or from another source, is not lost in the
// first stream, however the relay has ended before.
func TestAwayAndBack(t *testing.T) {
	t.Parallel()
	other := func(r *rig) {
		r.cfg.Stream.Name, r.cfg.Stream.Pattern, r.cfg.Subject = "OTHER", "other.>", "other.{event_type}"
	}
	for name, change := range map[string]func(*rig){
		"another stream":        other,
		"another source":        func(r *rig) { other(r); r.cfg.Source = "another" },
		"another slot, polling": func(r *rig) { other(r); r.cfg.Slot += "_b"; r.cfg.Mode = relay.ModePoll },
		"another relay":         nil,
		"another relay, slot":   nil,
	} {
		for _, killed := range []bool{false, true} {
			if killed && change == nil {
				continue // nothing tells its marks from those of the relay's last second
			}
			t.Run(fmt.Sprint(name, ", killed ", killed), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.createStream(nil)
				r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
				here := r.cfg
				next := 1
				deliver := func(killed bool) {
					t.Helper()
					next += 50
					if killed {
						p := r.launch().awaitState("streaming")
						r.put(next-50, next-1)
						r.pending(0)
						p.kill()
						return
					}
					x := r.start()
					r.put(next-50, next-1)
					r.pending(0)
					x.halt()
					x.quietBut()
				}
				var want []int
				for range 2 {
					want = append(want, next, next+49)
					deliver(killed)
					if change == nil {
						if name == "another relay" {
							r.dropSlot(r.cfg.Slot)
						}
						r.put(next, next+49)
						r.exec(`UPDATE outbox_messages SET processed_at = now() WHERE processed_at IS NULL`)
						next += 50
						continue
					}
					change(r)
					deliver(false)
					r.cfg = here
				}
				want = append(want, next, next+49)
				deliver(false)
				r.storedIs(want...)
				t.Cleanup(func() { r.dropSlot(here.Slot + "_b") })
			})
		}
	}
}

// TestLostWhileAway: the stream loses messages while another relay delivers the outbox. Their rows are sent again, and
// the other relay's are not.
func TestLostWhileAway(t *testing.T) {
	t.Parallel()
	for _, mark := range testenv.Some(t, 1, outbox.MarkUpdate, outbox.MarkJournal) {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.markWith(mark)
			x := r.start().streaming()
			r.put(1, 50)
			r.pending(0)
			x.halt()
			restore := r.backup()
			x = r.start().streaming()
			r.put(51, 60)
			r.pending(0)
			x.halt()
			restore()
			here := r.elsewhere()
			x = r.start()
			r.put(61, 70)
			r.pending(0)
			x.halt()
			here()
			x = r.start().streaming()
			x.alarmed("events_lost")
			r.put(71, 80)
			r.pending(0)
			r.storedIs(1, 60, 71, 80)
		})
	}
}

// fit has the relay deliver a part of the rows from now on. whole undoes it.
func (r *rig) fit(where string, shard outbox.Shard) (whole func()) {
	here := r.cfg
	o := *r.cfg.Outboxes[0]
	o.Where, o.Shard = where, shard
	r.cfg.Outboxes, r.cfg.Publication = []*outbox.Table{&o}, r.cfg.Publication+"_part"
	return func() { r.cfg = here }
}

// TestLostWhileNarrowed: the outbox is narrowed, the stream loses messages of that time, and the outbox is as wide as before.
// Its messages have the same ids in the same stream, so none of their marks is another relay's.
func TestLostWhileNarrowed(t *testing.T) {
	t.Parallel()
	for _, name := range testenv.Some(t, 2, "where", "where, narrow still", "shard", "shard, killed") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			x := r.start().streaming()
			r.put(1, 50)
			r.pending(0)
			x.halt()
			where, shard := "event_type = 'order.placed'", outbox.Shard{}
			if strings.HasPrefix(name, "shard") {
				where, shard = "", outbox.Shard{Index: 1, Of: 2}
				all := *r.cfg.Outboxes[0]
				all.Shard = shard
				if r.query1(`SELECT count(*) FROM outbox_messages t WHERE `+all.ShardSQL("t")) == "0" { // there is one aggregate
					shard.Index = 2
				}
			}
			whole := r.fit(where, shard)
			x = r.start().streaming()
			r.put(51, 60)
			r.pending(0)
			restore := r.backup()
			r.put(61, 70)
			r.pending(0)
			x.halt()
			restore()
			if name != "where, narrow still" {
				whole()
			}
			if strings.HasSuffix(name, "killed") {
				r.exec(`UPDATE outbox_sent SET ended_at = NULL WHERE shard <> ''`)
			}
			x = r.start().streaming()
			r.saysLost(x, 61, 70)
			r.put(71, 71)
			r.pending(0)
			r.storedIs(1, 71)
		})
	}
}

// elsewhere has the relay deliver to another stream, which it makes.
func (r *rig) elsewhere() (here func()) {
	before := r.cfg
	r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
	r.cfg.Stream.Name, r.cfg.Stream.Pattern, r.cfg.Subject = "OTHER", "other.>", "other.{event_type}"
	return func() { r.cfg = before }
}

// TestPartsSwapStreams: the parts of an outbox are delivered to two streams, and each part to the other stream then.
func TestPartsSwapStreams(t *testing.T) {
	t.Parallel()
	for i, by := range []string{"shard", "where"} {
		for _, mark := range testenv.Some(t, 1, [][]outbox.Mark{{outbox.MarkUpdate, outbox.MarkJournal}, {outbox.MarkJournal, outbox.MarkUpdate}}[i]...) {
			for _, mode := range testenv.Some(t, 1, [][]relay.Mode{{relay.ModePoll, relay.ModeAuto}, {relay.ModeAuto, relay.ModePoll}}[i]...) {
				t.Run(fmt.Sprintf("%s/%s/%s", by, mark, mode), func(t *testing.T) {
					t.Parallel()
					n := newNamed(t, mark, mode)
					n.elsewhere()()
					put := func() {
						n.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
							SELECT 'order', n % 10, CASE n % 2 WHEN 0 THEN 'order.placed' ELSE 'order.paid' END, jsonb_build_object('n', n)
							FROM generate_series($1::int, $2::int) n ORDER BY n`, n.next, n.next+49)
						n.next += 50
					}
					parts := func(streams ...string) (halt func()) {
						var all []*running
						for i, stream := range streams {
							r := n.beside(fmt.Sprint("_", i))
							if by == "shard" {
								r.fit("", outbox.Shard{Index: i + 1, Of: 2})
							} else {
								r.fit("event_type "+[]string{"=", "<>"}[i]+" 'order.placed'", outbox.Shard{})
							}
							if r.cfg.Publication += fmt.Sprint(i); stream == "OTHER" {
								r.toOther()
							}
							all = append(all, r.start().working(mode))
						}
						return func() {
							for _, x := range all {
								x.quietBut()
								x.halt()
							}
						}
					}
					halt := parts("EVENTS", "OTHER")
					for range 2 {
						put()
						n.marked()
					}
					halt()
					put()
					halt = parts("OTHER", "EVENTS")
					put()
					n.marked()
					halt()
					if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, n.next-1)) {
						t.Errorf("%d messages of %d rows are stored", len(got), n.next-1)
					}
				})
			}
		}
	}
}

// TestOldMessageIsDeleted: the rows go to a stream, to another one, and to the first one again, of which an old message is deleted
// then. None of the other stream's rows looks lost.
func TestOldMessageIsDeleted(t *testing.T) {
	t.Parallel()
	for _, mark := range testenv.Some(t, 1, outbox.MarkUpdate, outbox.MarkJournal) {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			n := newNamed(t, mark, relay.ModePoll)
			run := func(rows int) {
				t.Helper()
				x := n.start().working(relay.ModePoll)
				n.add(rows)
				n.marked()
				x.quietBut()
				x.halt()
			}
			run(jetstream.U + 100)
			here := n.elsewhere()
			run(50)
			here()
			run(50)
			s, err := n.js().Stream(t.Context(), "EVENTS")
			n.must(err)
			n.must(s.DeleteMsg(t.Context(), 50))
			run(10)
			if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, slices.Delete(span(1, n.next-1), 49, 50)) {
				t.Errorf("%d messages of %d rows are stored", len(got), n.next-1)
			}
		})
	}
}

// TestPurgedAndNarrowed: the messages are purged and the outbox is narrowed. That nothing could be compared is said, also where
// it has been delivered elsewhere meanwhile.
func TestPurgedAndNarrowed(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("delivered elsewhere: ", away), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			x := r.start().streaming()
			r.put(1, 50)
			r.pending(0)
			x.halt()
			if away {
				here := r.elsewhere()
				x = r.start()
				r.put(51, 60)
				r.pending(0)
				x.halt()
				here()
			}
			s, err := r.js().Stream(t.Context(), "EVENTS")
			r.must(err)
			r.must(s.Purge(t.Context()))
			r.fit("event_type = 'order.placed'", outbox.Shard{})
			x = r.start().streaming()
			x.alarmed("nothing_to_compare")
		})
	}
}

// TestReadMessageIsOfAnother: the message that a session has read last is of an outbox that the next one does not have, which has
// a new one instead.
func TestReadMessageIsOfAnother(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	third := *r.cfg.Outboxes[0]
	third.Name = "third_outbox"
	r.exec(`CREATE TABLE third_outbox (LIKE outbox_messages INCLUDING ALL); INSERT INTO third_outbox
		(aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', 3, 'order.placed', '{"n": 0}', now())`)
	both := r.cfg.Outboxes
	r.createStream(nil)
	x := r.start().streaming()
	r.put(1, 50)
	r.pending(0)
	r.putSecond(1001, 1001)
	x.halt()
	here := r.elsewhere()
	x = r.start()
	r.put(51, 100)
	r.pending(0)
	x.halt()
	here()
	r.start().streaming().halt()
	r.cfg.Outboxes = []*outbox.Table{both[0], &third}
	r.exec(`ALTER PUBLICATION walpost ADD TABLE third_outbox`)
	x = r.start().streaming()
	r.put(101, 101)
	r.pending(0)
	r.storedIs(1, 50, 1001, 1001, 101, 101)
	x.quietBut("nothing_to_compare")
}

// TestMarksAreRounded: marks have no zone and no fractions of a second. Those that were made just before the relay had ended, or
// just after it had begun, are compared.
func TestMarksAreRounded(t *testing.T) {
	t.Parallel()
	for _, typ := range testenv.Some(t, 1, "timestamp(0)", "timestamptz(0)") {
		for _, bound := range []string{"ended", "begun"} {
			t.Run(typ+", just "+bound, func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.exec(`ALTER TABLE outbox_messages ALTER COLUMN processed_at TYPE ` + typ)
				x := r.start().streaming()
				r.put(1, 50)
				r.pending(0)
				restore := r.backup()
				x.streaming()
				r.put(51, 60)
				r.pending(0)
				x.halt()
				restore()
				const last = `(SELECT max(processed_at)::timestamptz FROM outbox_messages)`
				if bound == "ended" { // at .7, and the marks were made at .6
					r.exec(`UPDATE outbox_sent SET read_at = NULL, ended_at = ` + last + ` - interval '0.3 s'`)
				} else { // at .3, and the marks were made at .4
					r.exec(`UPDATE outbox_sent SET read_at = ` + last + ` + interval '0.3 s', ended_at = NULL`)
				}
				x = r.start().streaming()
				r.saysLost(x, 51, 60)
				r.put(61, 61)
				r.pending(0)
				r.storedIs(1, 61)
			})
		}
	}
}

// TestLostBehindOthers: messages of an outbox are lost, then more messages of another one are stored than a read-back looks at,
// and the outbox is back alone.
func TestLostBehindOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	both := r.cfg.Outboxes
	r.start().streaming().halt()
	r.cfg.Outboxes = both[:1]
	x := r.start().streaming()
	r.put(1, 50)
	r.pending(0)
	restore := r.backup()
	r.put(51, 60)
	r.pending(0)
	x.halt()
	restore()
	r.cfg.Outboxes = both[1:]
	x = r.start().streaming()
	r.putSecond(1, jetstream.U+1000)
	x.halt()
	r.cfg.Outboxes = both[:1]
	x = r.start().streaming()
	r.saysLost(x, 51, 60)
	r.put(61, 61)
	r.pending(0)
	r.storedIs(1, 50, 1, jetstream.U+1000, 51, 61)
}

// TestClockGoesBack: marks that were made while the clock was ahead are compared.
func TestClockGoesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 50)
	r.pending(0)
	restore := r.backup()
	r.put(51, 60)
	r.pending(0)
	x.halt()
	r.exec(`UPDATE outbox_messages SET processed_at = processed_at + interval '30 s'`)
	r.exec(`UPDATE outbox_sent SET read_at = read_at + interval '30 s', noted_at = noted_at + interval '30 s', ended_at = ended_at + interval '30 s'`)
	r.start().streaming().halt()
	restore()
	x = r.start().streaming()
	r.saysLost(x, 51, 60)
	r.put(61, 61)
	r.pending(0)
	r.storedIs(1, 61)
}

// TestArchivedMeanwhile: another relay has delivered rows to another stream, and they were archived. The first relay's slot still
// has their inserts.
func TestArchivedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("delivered before: ", before), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			there := *r
			there.cfg.Slot += "_b"
			t.Cleanup(func() { r.dropSlot(there.cfg.Slot) })
			there.cfg.Stream.Name, there.cfg.Stream.Pattern, there.cfg.Subject = "OTHER", "other.>", "other.{event_type}"
			r.createStream(nil)
			r.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
			if !before {
				there.cfg.Slot = r.cfg.Slot
			}
			x := r.start().streaming()
			if before {
				r.put(1, 50)
				r.pending(0)
			}
			x.halt()
			x = there.start()
			r.put(51, 60)
			r.pending(0)
			x.halt()
			r.archiveOldest(60)
			x = r.start().streaming()
			r.put(61, 61)
			r.pending(0)
			want := []int{61, 61}
			if before {
				want = []int{1, 50, 61, 61}
			}
			r.storedIs(want...)
			x.quietBut()
		})
	}
}

// TestStartWaitsForItsNote: a start that cannot note that it begins names who keeps it from that. A session that runs goes on.
func TestStartWaitsForItsNote(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	lock := r.conn()
	r.must(run(t.Context(), lock, `BEGIN; SELECT FROM outbox_sent FOR UPDATE`))
	r.put(11, 20)
	r.pending(0)
	x.halt()
	r.put(21, 30)
	x = r.start()
	holder := fmt.Sprint(x.alarmed("row_locked")["holder"])
	if want := fmt.Sprint(lock.PgConn().PID()); !strings.Contains(holder, want) {
		t.Errorf("holder %q, want process %s", holder, want)
	}
	r.must(run(t.Context(), lock, `ROLLBACK`))
	r.pending(0)
	r.storedIs(1, 30)
	x.over("row_locked")
}

// snapshot takes the stream through the API, as nats stream backup does. restore deletes it and puts the copy in its place,
// while NATS runs.
func (r *rig) snapshot() (restore func()) {
	r.t.Helper()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	ask := func(subject string, data []byte) *nats.Msg {
		r.t.Helper()
		reply, err := nc.Request(subject, data, time.Minute)
		r.must(err)
		var failed struct{ Error any }
		if _ = json.Unmarshal(reply.Data, &failed); failed.Error != nil {
			r.t.Fatalf("%s: %v", subject, failed.Error)
		}
		return reply
	}
	inbox := nc.NewInbox()
	chunksFrom, err := nc.SubscribeSync(inbox)
	r.must(err)
	var taken struct{ Config, State json.RawMessage }
	r.must(json.Unmarshal(ask("$JS.API.STREAM.SNAPSHOT.EVENTS", []byte(`{"deliver_subject": "`+inbox+`"}`)).Data, &taken))
	var chunks [][]byte
	for ended := false; !ended; {
		m, err := chunksFrom.NextMsg(time.Minute)
		r.must(err)
		chunks, ended = append(chunks, slices.Clone(m.Data)), len(m.Data) == 0
		if m.Reply != "" {
			r.must(m.Respond(nil))
		}
	}
	return func() {
		r.t.Helper()
		r.must(r.js().DeleteStream(r.t.Context(), "EVENTS"))
		request, err := json.Marshal(taken)
		r.must(err)
		var to struct {
			Deliver string `json:"deliver_subject"`
		}
		r.must(json.Unmarshal(ask("$JS.API.STREAM.RESTORE.EVENTS", request).Data, &to))
		for _, c := range chunks {
			ask(to.Deliver, c)
		}
	}
}

// TestSharedStreamIsRestored: a stream that others publish to is restored under a running relay, and has grown past its
// messages when the relay stops.
func TestSharedStreamIsRestored(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Stream.Shared, r.cfg.Stream.Pattern, r.cfg.Stream.Batching = true, "events.>", ""
	r.createStream(nil)
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	restore := r.snapshot()
	r.put(41, 60)
	r.pending(0)
	restore()
	r.put(61, 130)
	r.pending(0)
	x.halt()
	x = r.start().streaming()
	x.alarmed("events_lost")
	r.put(131, 131)
	r.pending(0)
	got := r.numbers()
	slices.Sort(got)
	if !slices.Equal(got, span(1, 131)) {
		t.Errorf("stored %s", brief(got))
	}
}
