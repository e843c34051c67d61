package relay_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// request writes a request as `walpost replay` does.
func (r *rig) request(c table.ReplayChoice, change ...func(*table.Replay)) (id int64) {
	r.t.Helper()
	db, err := table.Open(r.t.Context(), table.Config{URL: r.url, Slot: r.cfg.Slot})
	r.must(err)
	defer db.Close()
	request := &table.Replay{Slot: r.cfg.Slot, Outbox: r.cfg.Outboxes[0].String(), ReplayChoice: c}
	for _, f := range change {
		f(request)
	}
	id, err = db.RequestReplay(r.t.Context(), request)
	r.must(err)
	return id
}

// replayed waits until a request has ended, and tells how.
func (r *rig) replayed(id int64) string {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("replay %d ends", id), func() bool {
		return r.query1(`SELECT state IN ('done', 'failed', 'cancelled') FROM outbox_replays WHERE replay_id = $1`, id) == "true"
	})
	return r.query1(`SELECT concat_ws(' ', state, sent, refused, last_error) FROM outbox_replays WHERE replay_id = $1`, id)
}

func (r *rig) wantReplayed(id int64, want string) {
	r.t.Helper()
	if got := r.replayed(id); got != want {
		r.t.Errorf("replay %d: %s, want %s", id, got, want)
	}
}

// archiveOldest moves so many rows as retention does.
func (r *rig) archiveOldest(rows int) {
	r.t.Helper()
	r.exec(`WITH gone AS (DELETE FROM outbox_messages WHERE id IN (
			SELECT id FROM outbox_messages WHERE processed_at IS NOT NULL ORDER BY processed_at, id LIMIT $1) RETURNING *)
		INSERT INTO outbox_messages_archive SELECT 'public.outbox_messages', * FROM gone`, rows)
}

// replaysOf are the messages of a request, and originals those that are of none.
func replaysOf(all []*natsjs.RawStreamMsg, id int64) (replays, originals []*natsjs.RawStreamMsg) {
	for _, m := range all {
		switch {
		case m.Header.Get(jetstream.ReplayOfHeader) == "":
			originals = append(originals, m)
		case strings.HasSuffix(m.Header.Get(nats.MsgIdHdr), fmt.Sprintf("/replay-%d", id)):
			replays = append(replays, m)
		}
	}
	return replays, originals
}

func text(s string) *string { return &s }

// TestReplay: what was asked for is published again, from the table and from the archive, in the order of the marks,
// and nothing else changes.
func TestReplay(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for _, mode := range []string{"stream", "poll"} {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				r := newRig(t, pg)
				r.cfg.Mode = relay.Mode(mode)
				x := r.start()
				r.put(1, 1300)
				r.pending(0)
				r.exec(putSQL, "order.paid", 1301, 1400)
				r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
					VALUES ('user', 7, 'user.born', '{"n": 1401}')`)
				r.pending(0)
				r.archiveOldest(600)
				r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at, last_error)
					VALUES ('order', 1, 'order.paid', '{"n": -1}', now(), 'skipped: not to be sent')`)
				marks := r.query1(`SELECT sum(extract(epoch FROM processed_at))::text FROM outbox_messages`)
				half := r.query1(`SELECT max(processed_at)::text FROM outbox_messages_archive`)
				at, err := time.Parse("2006-01-02 15:04:05.999999-07", half)
				r.must(err)
				for _, c := range []struct {
					choice table.ReplayChoice
					want   []int
				}{
					{table.ReplayChoice{}, span(1, 1401)},
					{table.ReplayChoice{EventTypes: []string{"order.paid", "user.born"}}, span(1301, 1401)},
					{table.ReplayChoice{AggregateType: text("user"), AggregateID: text("7"), TenantID: text("0")}, span(1401, 1401)},
					{table.ReplayChoice{IDs: []string{"2", "1300", "99999"}}, []int{2, 1300}},
					{table.ReplayChoice{TenantID: text("1")}, nil},
					{table.ReplayChoice{Until: &at}, nil},
				} {
					id := r.request(c.choice)
					if c.choice.Until != nil { // marks of one statement are of one time
						n, _ := strconv.Atoi(r.query1(`SELECT count(*)::text FROM outbox_messages_archive WHERE processed_at < $1`, at))
						c.want = span(1, n)
					}
					r.wantReplayed(id, fmt.Sprintf("done %d 0", len(c.want)))
					replays, originals := replaysOf(r.stored(), id)
					if got := numbersOf(t, replays); !slices.Equal(got, c.want) {
						t.Errorf("replay %d: stored %s, want %s", id, brief(got), brief(c.want))
					}
					r.sameAsOriginals(replays, originals)
				}
				if got := r.query1(`SELECT sum(extract(epoch FROM processed_at))::text FROM outbox_messages`); got != marks {
					t.Error("marks have changed")
				}
				if n := x.metric("outbox_throughput_total"); n != 1401 {
					t.Errorf("%v events count as delivered, want 1401", n)
				}
				if n := x.metric("walpost_replay_messages_total"); n < 1401+101+1+2 {
					t.Errorf("%v messages count as replayed", n)
				}
				// The next start sees replays alone at the tail.
				x.halt()
				x = r.start()
				r.put(3001, 3001)
				r.pending(0)
				x.quietBut()
			})
		}
	})
}

// sameAsOriginals compares messages with those that they repeat.
func (r *rig) sameAsOriginals(replays, originals []*natsjs.RawStreamMsg) {
	r.t.Helper()
	byID := map[string]*natsjs.RawStreamMsg{}
	for _, m := range originals {
		byID[m.Header.Get("ce-id")] = m
	}
	for _, m := range replays {
		of := byID[m.Header.Get(jetstream.ReplayOfHeader)]
		if of == nil {
			r.t.Fatalf("message %d repeats %q, which is not there", m.Sequence, m.Header.Get(jetstream.ReplayOfHeader))
		}
		if m.Subject != of.Subject || string(m.Data) != string(of.Data) || m.Header.Get(jetstream.ViaHeader) != "replay" {
			r.t.Fatalf("message %d is not like %d: %v", m.Sequence, of.Sequence, m.Header)
		}
		if want := m.Header.Get("ce-source") + "/" + m.Header.Get("ce-id"); m.Header.Get(nats.MsgIdHdr) != want {
			r.t.Fatalf("message %d: id %q, want %q", m.Sequence, m.Header.Get(nats.MsgIdHdr), want)
		}
		for name, value := range of.Header {
			if strings.HasPrefix(name, "ce-") && name != "ce-id" && !slices.Equal(value, m.Header[name]) {
				r.t.Fatalf("message %d: %s is %q, want %q", m.Sequence, name, m.Header[name], value)
			}
		}
	}
}

// crashPlaces are all steps of a replay.
var crashPlaces = []string{
	"replay-begun", "replay-read", "replay-sent", "replay-stored", "replay-written", "replay-scanned",
	"replay-sent", "replay-scanned", "replay-ended",
}

// TestCrashWhileReplaying kills the relay at every step of a replay, while events come. Each row is published once
// for each request, and each event once and in order.
func TestCrashWhileReplaying(t *testing.T) {
	t.Parallel()
	for name, to := range map[string]*string{"own stream": nil, "another stream": text("REBUILT")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRig(t, pg)
				r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = crashWindow })
				if to != nil {
					_, err := r.js().CreateStream(t.Context(), natsjs.StreamConfig{Name: *to, Subjects: []string{"again.>"}, Duplicates: crashWindow})
					r.must(err)
				}
				rows := cmp.Or(replayedRows(), testenv.Size(t, 7000, 100_000))
				r.fillArchive(rows)
				l := newLedger(r)
				stop := l.start(load{writers: 2, rows: 10, pause: 50 * time.Millisecond})
				id := r.request(table.ReplayChoice{EventTypes: []string{"old.event"}}, func(q *table.Replay) { q.ToStream = to })
				for _, place := range testenv.Some(t, 3, crashPlaces...) {
					n := 1 + rand.IntN(testenv.Size(t, 3, 10))
					if strings.HasSuffix(place, "begun") || strings.HasSuffix(place, "scanned") || strings.HasSuffix(place, "ended") {
						n = 1
					}
					if place == "replay-written" {
						n = 1
					}
					r.launch(fmt.Sprintf("WALPOST_CRASH=%s:%d", place, n)).crashed(place)
				}
				p := r.launch()
				r.wantReplayed(id, fmt.Sprintf("done %d 0", rows))
				stop()
				l.ended()
				r.passesOver(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`)
				p.terminate()
				r.oncePerRequest(id, rows, to)
				r.ledgerBesideReplays(l)
			})
		})
	}
}

// replayedRows is how many rows the tests of replays are to have, 0 where that is not said.
func replayedRows() int {
	rows, _ := strconv.Atoi(os.Getenv("WALPOST_REPLAY_ROWS"))
	return rows
}

// fillArchive makes rows that look as if they had been delivered and archived.
func (r *rig) fillArchive(rows int) {
	r.t.Helper()
	r.exec(`INSERT INTO outbox_messages_archive (outbox, id, tenant_id, aggregate_type, aggregate_id, event_type, event_version,
			payload, occurred_at, available_at, processed_at, attempts)
		SELECT 'public.outbox_messages', 1000000000 + n, 0, 'old', n % 100, 'old.event', 1, jsonb_build_object('n', n, 'pad', repeat('x', 200)),
			now() - interval '10 days', now() - interval '10 days', now() - interval '10 days' + (n / 500) * interval '1 second', 0
		FROM generate_series(1, $1::int) n`, rows)
	r.exec(`ANALYZE outbox_messages_archive`)
}

// oncePerRequest compares a request's messages with the rows of fillArchive: each once, in their order.
func (r *rig) oncePerRequest(id int64, rows int, to *string) {
	r.t.Helper()
	stream := "EVENTS"
	if to != nil {
		stream = *to
	}
	next, suffix := 1, fmt.Sprintf("/replay-%d", id)
	eachHeader(r.t, r.nats.URL(), stream, func(seq uint64, h nats.Header) {
		message := h.Get(nats.MsgIdHdr)
		if !strings.HasSuffix(message, suffix) {
			return
		}
		if parts := strings.Split(message, "/"); parts[len(parts)-3] != strconv.Itoa(1_000_000_000+next) {
			r.t.Errorf("message %d is %s, want row %d", seq, message, next)
		}
		next++
	})
	if next-1 != rows {
		r.t.Errorf("%d messages of replay %d, want %d", next-1, id, rows)
	}
}

// ledgerBesideReplays is compare for a stream that holds replays.
func (r *rig) ledgerBesideReplays(l *ledger) {
	r.t.Helper()
	last, got := map[string]int{}, 0
	eachHeader(r.t, r.nats.URL(), "EVENTS", func(seq uint64, h nats.Header) {
		if h.Get(jetstream.ReplayOfHeader) != "" {
			return
		}
		account := h.Get("ce-aggregateid")
		if n, _ := strconv.Atoi(h.Get("ce-traceid")); n != last[account]+1 {
			r.t.Errorf("message %d: event %d of account %s behind %d", seq, n, account, last[account])
		}
		last[account]++
		got++
	})
	if want := l.committed(); got != want {
		r.t.Errorf("%d events are stored, %d were committed", got, want)
	}
}

// TestServersCrashUnderAReplay: PostgreSQL crashes, which may take the cursor back, and then JetStream is away.
func TestServersCrashUnderAReplay(t *testing.T) {
	t.Parallel()
	testenv.ClusterWith(t, testenv.PGOptions{}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
		x := r.start().streaming()
		rows := testenv.Size(t, 15_000, 150_000)
		r.fillArchive(rows)
		l := newLedger(r)
		stop := l.start(load{writers: 2, rows: 10, pause: 50 * time.Millisecond})
		id := r.request(table.ReplayChoice{EventTypes: []string{"old.event"}})
		sent := func(n int) {
			eventually(t, fmt.Sprintf("%d rows are replayed", n), func() bool { return x.metric("walpost_replay_messages_total") > float64(n) })
		}
		sent(rows / 3)
		r.must(pg.Stop(t.Context(), testenv.Immediate))
		r.must(pg.Start(t.Context()))
		sent(rows * 2 / 3)
		r.must(r.nats.Stop(t.Context()))
		time.Sleep(time.Second)
		r.must(r.nats.Start(t.Context()))
		r.wantReplayed(id, fmt.Sprintf("done %d 0", rows))
		stop()
		l.ended()
		r.passesOver(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`)
		r.oncePerRequest(id, rows, nil)
		r.ledgerBesideReplays(l)
	})
}

// TestReplayIsCancelled: a request that is cancelled, or deleted, ends, and the relay goes on.
func TestReplayIsCancelled(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.fillArchive(100_000)
	for _, end := range []string{
		`UPDATE outbox_replays SET state = 'cancelled', finished_at = now() WHERE replay_id = $1`,
		`DELETE FROM outbox_replays WHERE replay_id = $1`,
	} {
		before := x.metric("walpost_replay_messages_total")
		id := r.request(table.ReplayChoice{})
		eventually(t, "rows are replayed", func() bool { return x.metric("walpost_replay_messages_total") > before })
		r.exec(end, id)
		eventually(t, "the replay ends", func() bool { return x.Status().Replay == nil })
	}
	r.wantReplayed(r.request(table.ReplayChoice{IDs: []string{"1000000007"}}), "done 1 0")
	x.quietBut()
}

// TestReplayCannotBeFulfilled: a request that no try can fulfil fails, and says why.
func TestReplayCannotBeFulfilled(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming()
	r.fillArchive(10)
	_, err := r.js().CreateStream(t.Context(), natsjs.StreamConfig{Name: "NARROW", Subjects: []string{"a", "b"}})
	r.must(err)
	for _, c := range []struct {
		change func(*table.Replay)
		want   string
	}{
		{func(q *table.Replay) { q.Outbox = "public.other" }, "outbox public.other is none of the relay's"},
		{func(q *table.Replay) { q.ToStream = text("NOWHERE") }, "stream not found"},
		{func(q *table.Replay) { q.ToStream = text("EVENTS") }, "the relay's own"},
		{func(q *table.Replay) { q.ToStream = text("NARROW") }, "want one of the form prefix.>"},
		{func(q *table.Replay) { q.IDs = []string{"seven"} }, "invalid input syntax for type bigint"},
	} {
		if got := r.replayed(r.request(table.ReplayChoice{}, c.change)); !strings.HasPrefix(got, "failed 0 0 ") || !strings.Contains(got, c.want) {
			t.Errorf("%s, want failed: %s", got, c.want)
		}
	}
}

// TestRowsThatCannotBeReplayed are counted, and the others are published.
func TestRowsThatCannotBeReplayed(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.fillArchive(10)
	r.exec(`UPDATE outbox_messages_archive SET event_type = 'no subject' WHERE id = 1000000003`)
	r.exec(`UPDATE outbox_messages_archive SET payload = to_jsonb(repeat('x', 2000000)) WHERE id = 1000000005`)
	got := r.replayed(r.request(table.ReplayChoice{}))
	if !strings.HasPrefix(got, "done 8 2 row 1000000003: subject") {
		t.Errorf("%s, want 8 rows sent and 2 refused", got)
	}
	if n := x.metric("outbox_failures_total"); n != 0 {
		t.Errorf("%v rows count as failed", n)
	}
}

// TestReplayInARestoredStream goes on from its cursor, and says what may be missing.
func TestReplayInARestoredStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	p := r.launch().awaitState("streaming")
	r.put(1, 100)
	r.pending(0)
	p.terminate()
	r.fillArchive(30_000)
	restore := r.backup()
	id := r.request(table.ReplayChoice{})
	// On a slow machine the cursor is also written before the first rows are read.
	for r.count(`SELECT sent FROM outbox_replays WHERE replay_id = $1`, id) == 0 {
		r.launch("WALPOST_CRASH=replay-written:1").crashed("replay-written")
	}
	restore()
	p = r.launch()
	got := r.replayed(id)
	if !strings.HasPrefix(got, "done 30100 0 the stream was rolled back") {
		t.Errorf("%s, want a note", got)
	}
	p.terminate()
}

// TestReplayKeepsLiveLatency measures the commit-to-ack times of events with and without a replay beside them, in
// turn: a machine's own pace changes from minute to minute. It fails on nothing but lost rows: what it measures
// depends on the machine.
func TestReplayKeepsLiveLatency(t *testing.T) {
	rows := replayedRows()
	if rows == 0 {
		t.Skip("WALPOST_REPLAY_ROWS says how many rows, on a quiet machine")
	}
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{FSync: true}))
	r.cfg.Stream.Batching = jetstream.BatchFast
	r.start().streaming().halt()
	r.fillArchive(rows)
	r.exec(`VACUUM ANALYZE outbox_messages_archive`)
	r.exec(`CHECKPOINT`)
	l := newLedger(r)
	type measured struct{ commits, stored timings }
	beside := func(m *measured, do func()) {
		syscall.Sync() // what the one before has left to be written to the disk
		r.cfg.OnStored = m.stored.add
		x := r.start().streaming()
		stop := l.each(2, func(ctx context.Context, c *pgx.Conn) error {
			begun := time.Now()
			err := l.move(ctx, c, 1, 100)
			m.commits.add(time.Since(begun))
			sleepUntil(ctx, 5*time.Millisecond)
			return err
		})
		do()
		stop()
		r.pending(0)
		x.halt()
	}
	nothing := func() { time.Sleep(10 * time.Second) }
	var ids []int64
	replay := func() {
		id := r.request(table.ReplayChoice{EventTypes: []string{"old.event"}})
		for r.query1(`SELECT state FROM outbox_replays WHERE replay_id = $1`, id) != "done" {
			time.Sleep(20 * time.Millisecond)
		}
		took, err := time.ParseDuration(r.query1(`SELECT extract(epoch FROM finished_at - started_at) || 's' FROM outbox_replays WHERE replay_id = $1`, id))
		r.must(err)
		t.Logf("%d rows in %s: %.0f/s", rows, took.Round(time.Millisecond), float64(rows)/took.Seconds())
		ids = append(ids, id)
	}
	var alone, busy measured
	t.Log("a replay with no event beside it:")
	r.cfg.OnStored = nil
	x := r.start().streaming()
	replay()
	x.halt()
	t.Log("replays beside events:")
	beside(&alone, nothing)
	for range 2 {
		beside(&busy, replay)
		beside(&alone, nothing)
	}
	for _, id := range ids {
		r.oncePerRequest(id, rows, nil)
	}
	t.Logf("live commits: %s alone, %s beside a replay", &alone.commits, &busy.commits)
	t.Logf("from them to their PubAcks: %s alone, %s beside a replay", &alone.stored, &busy.stored)
	t.Logf("p99 beside a replay by that alone: %.2f", float64(busy.stored.percentile(99))/float64(alone.stored.percentile(99)))
}

// TestReplaysProveNothing: where JetStream has lost events that were published again, the replays are no proof of
// them. They are found lost, and delivered again.
func TestReplaysProveNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 20)
	r.pending(0)
	r.wantReplayed(r.request(table.ReplayChoice{}), "done 20 0")
	x.halt()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	for seq := uint64(11); seq <= 20; seq++ {
		r.must(s.DeleteMsg(t.Context(), seq))
	}
	x = r.start().streaming()
	x.alarmed("events_lost")
	r.pending(0)
	_, originals := replaysOf(r.stored(), 1)
	if got := numbersOf(t, originals); !slices.Equal(got, span(1, 20)) {
		t.Errorf("stored %s, want 1-20", brief(got))
	}
}

// TestReplayOfShards: each relay publishes the rows of its own shard, into its own stream.
func TestReplayOfShards(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	one, two := r.shard(1, 2), r.shard(2, 2)
	one.start().streaming()
	two.start().streaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 200) n`)
	r.pending(0)
	r.archiveOldest(100)
	sent := 0
	for _, s := range []*rig{one, two} {
		id := s.request(table.ReplayChoice{})
		if got := s.replayed(id); !strings.HasPrefix(got, "done ") {
			t.Errorf("replay %d: %s", id, got)
		}
		replays, originals := replaysOf(readStream(t, s.nats.URL(), s.cfg.Stream.Name), id)
		if got, want := numbersOf(t, replays), numbersOf(t, originals); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("shard %s: replayed %s, stored %s", s.cfg.Outboxes[0].Shard, brief(got), brief(want))
		}
		sent += len(replays)
	}
	if sent != 200 {
		t.Errorf("%d rows were replayed, want 200", sent)
	}
}

// TestReplayOfARowThatIsThereTwice: the archive has a row a second time, with the same content. JetStream knows the
// second message's id. It is refused, and neither the replay nor the relay stops at it.
func TestReplayOfARowThatIsThereTwice(t *testing.T) {
	t.Parallel()
	for _, batching := range []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic} {
		t.Run(string(batching), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Stream.Batching = batching
			r.createStream(nil)
			x := r.start().streaming()
			r.fillArchive(50)
			r.exec(`INSERT INTO outbox_messages_archive SELECT * FROM outbox_messages_archive WHERE id IN (1000000007, 1000000031)`)
			if got := r.replayed(r.request(table.ReplayChoice{})); !strings.HasPrefix(got, "done 50 ") { // a session that begins between the two passes over the second
				t.Errorf("%s, want 50 rows sent", got)
			}
			r.put(1, 3)
			r.pending(0)
			r.oncePerRequest(1, 50, nil)
			x.quietBut()
			x.quiet("false_duplicate")
		})
	}
}

// TestReplaysHideNoLoss: behind so many replays that the newest messages are of no row, a start still finds what
// JetStream has lost.
func TestReplaysHideNoLoss(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 30)
	r.pending(0)
	x.halt()
	last := r.stored()[29].Header
	r.publish(jetstream.U+100, func(i int, h nats.Header) {
		h.Set(nats.MsgIdHdr, fmt.Sprintf("%s/replay-%d", last.Get(nats.MsgIdHdr), i))
		h.Set(jetstream.PositionHeader, last.Get(jetstream.PositionHeader))
		h.Set(jetstream.ReplayOfHeader, last.Get("ce-id"))
	})
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	for seq := uint64(21); seq <= 30; seq++ {
		r.must(s.DeleteMsg(t.Context(), seq))
	}
	x = r.start().streaming()
	x.alarmed("events_lost")
	r.pending(0)
	_, originals := replaysOf(r.stored(), -1)
	if got := numbersOf(t, originals); !slices.Equal(got, span(1, 30)) {
		t.Errorf("stored %s, want 1-30", brief(got))
	}
}

// TestWithoutTheTableOfRequests: a relay of a database that was not migrated delivers as ever, and says nothing.
func TestWithoutTheTableOfRequests(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := newRig(t, pg)
	r.exec(`DROP TABLE outbox_replays`)
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	time.Sleep(1500 * time.Millisecond)
	x.halt()
	x.quietBut()
	if n := x.logged("no replay can be requested").Len(); n != 0 {
		t.Error("the log complains of the missing table")
	}
}

// TestStandbyGoesOnWithAReplay: another relay takes over in the midst of one, and publishes no row twice.
func TestStandbyGoesOnWithAReplay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	y := r.start()
	const rows = 20_000
	r.fillArchive(rows)
	id := r.request(table.ReplayChoice{})
	eventually(t, "rows are replayed", func() bool { return x.metric("walpost_replay_messages_total") > 2000 })
	x.halt()
	r.wantReplayed(id, fmt.Sprintf("done %d 0", rows))
	r.oncePerRequest(id, rows, nil)
	if n := y.metric("walpost_replay_messages_total"); n == 0 {
		t.Error("the first relay did it all: the test shows nothing")
	}
	y.quietBut()
}

// TestReplayOfOneOutboxOfTwo: rows of the other one have the same ids, in the same archive.
func TestReplayOfOneOutboxOfTwo(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`CREATE TABLE other_messages (LIKE outbox_messages INCLUDING ALL)`)
	other := *r.cfg.Outboxes[0]
	other.Name = "other_messages"
	r.cfg.Outboxes = append(r.cfg.Outboxes, &other)
	r.start().streaming()
	r.put(1, 20)
	r.exec(strings.Replace(putSQL, "outbox_messages", "other_messages", 1), "order.placed", 101, 120)
	r.pending(0)
	eventually(t, "the other rows are marked", func() bool {
		return r.query1(`SELECT count(*) FROM other_messages WHERE processed_at IS NULL`) == "0"
	})
	r.archiveOldest(10)
	r.exec(`WITH gone AS (DELETE FROM other_messages WHERE id <= 5 RETURNING *)
		INSERT INTO outbox_messages_archive SELECT 'public.other_messages', * FROM gone`)
	for outbox, want := range map[string][]int{"public.outbox_messages": span(1, 20), "public.other_messages": span(101, 120)} {
		id := r.request(table.ReplayChoice{}, func(q *table.Replay) { q.Outbox = outbox })
		r.wantReplayed(id, "done 20 0")
		replays, _ := replaysOf(r.stored(), id)
		if got := numbersOf(t, replays); !slices.Equal(got, want) {
			t.Errorf("%s: replayed %s, want %s", outbox, brief(got), brief(want))
		}
	}
}
