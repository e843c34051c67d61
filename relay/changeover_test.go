package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/relay"
)

// pollingRelay works as eventferry's does: it claims a batch in the order of the aggregates, publishes it and
// marks it.
type pollingRelay struct {
	rig  *rig
	dies bool // between publishing and marking, when it is stopped
}

const (
	claimedRows = 100
	claimSQL    = `UPDATE outbox SET status = 1, claimed_at = now() WHERE id IN (
		SELECT o.id FROM outbox o WHERE (o.status = 0 OR o.status = 3 AND o.next_retry_at <= now()
			OR o.status = 1 AND o.claimed_at < now() - interval '60 s')
		AND NOT EXISTS (SELECT FROM outbox e WHERE e.aggregate_id = o.aggregate_id AND e.id < o.id AND e.status IN (1, 3))
		ORDER BY o.aggregate_id, o.id LIMIT 100 FOR UPDATE SKIP LOCKED) RETURNING id, topic, payload::text`
	doneSQL = `UPDATE outbox SET status = 2, processed_at = now() WHERE id = ANY ($1)`
)

func (p *pollingRelay) run(ctx context.Context) {
	conn := p.rig.conn()
	js := p.rig.js()
	for ctx.Err() == nil {
		rows, _ := conn.Query(context.Background(), claimSQL)
		type row struct {
			ID             int64
			Topic, Payload string
		}
		batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			p.rig.t.Error(err)
			return
		}
		sorted := map[int64]row{}
		var ids []int64
		for _, r := range batch {
			sorted[r.ID] = r
			ids = append(ids, r.ID)
		}
		for _, id := range slices.Sorted(slices.Values(ids)) {
			_, err := js.PublishMsg(context.Background(), &nats.Msg{
				Subject: "events." + sorted[id].Topic, Data: []byte(sorted[id].Payload), Header: nats.Header{},
			})
			if err != nil {
				p.rig.t.Error(err)
				return
			}
		}
		if ctx.Err() != nil && p.dies {
			return
		}
		if _, err := conn.Exec(context.Background(), doneSQL, ids); err != nil {
			p.rig.t.Error(err)
			return
		}
		if len(ids) == 0 {
			time.Sleep(20 * time.Millisecond)
		}
	}
}

// start runs it. The function that it returns stops it.
func (p *pollingRelay) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	return func() { cancel(); running.Wait() }
}

// TestChangeOver: a relay of another kind is replaced on its own table while producers write, and replaces
// this one again. No event is lost. What is published twice are the rows that the other relay had claimed
// when it died; those of a relay that is stopped are none.
func TestChangeOver(t *testing.T) {
	t.Parallel()
	for _, dies := range []bool{true, false} {
		for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
			t.Run(fmt.Sprintf("dies=%t/%s", dies, mode), func(t *testing.T) {
				t.Parallel()
				testChangeOver(t, dies, mode)
			})
		}
	}
}

func testChangeOver(t *testing.T, dies bool, mode relay.Mode) {
	e := existingTables["eventferry"]
	r := existingRig(t, e, mode)
	r.cfg.Stream.Shared = true // the other relay writes to it, too
	r.cfg.Stream.Batching = ""
	written := 0
	writing, stopWriting := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	conn := r.conn()
	writer.Go(func() {
		for writing.Err() == nil {
			written++
			if _, err := conn.Exec(context.Background(), e.insert, fmt.Sprintf("a%d", written%7), "order.placed", written); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Millisecond)
		}
	})
	grows := func(what string) {
		t.Helper()
		now := r.storedCount()
		eventually(t, what, func() bool { return r.storedCount() > now+300 })
	}
	stop := (&pollingRelay{rig: r, dies: dies}).start()
	grows("the other relay publishes")
	stop()
	x := r.begin()
	grows("this relay publishes")
	x.halt()
	stop = (&pollingRelay{rig: r}).start()
	grows("the other relay publishes again")
	stopWriting()
	writer.Wait()
	r.settled(e, written)
	stop()

	times, last, twice, misplaced := map[int]int{}, map[int]int{}, 0, 0
	for _, m := range r.stored() {
		var body struct{ N int }
		r.must(json.Unmarshal(m.Data, &body))
		if times[body.N]++; times[body.N] > 1 {
			twice++
			continue
		}
		if aggregate := body.N % 7; body.N < last[aggregate] {
			misplaced++
		} else {
			last[aggregate] = body.N
		}
	}
	t.Logf("%d events, %d lost, %d duplicated, %d reordered", written, written-len(times), twice, misplaced)
	if most := map[bool]int{true: claimedRows}[dies]; len(times) != written || twice > most || misplaced > 0 {
		t.Errorf("want none lost, at most %d duplicated, none reordered", most)
	}
}
