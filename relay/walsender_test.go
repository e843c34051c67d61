package relay_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// sightings are what pg_stat_replication told of the walsender on the relay's
// slot while it was watched.
type sightings struct {
	samples int
	pids    []int
	replies []time.Time   // of its standby statuses, each once
	oldest  time.Duration // the greatest age of a standby status
}

// watchWalsender looks several times a second until the returned function is
// called. Moments without a walsender are not samples.
func (r *rig) watchWalsender() (stop func() sightings) {
	r.t.Helper()
	conn := r.conn()
	ctx, cancel := context.WithCancel(context.Background())
	var s sightings
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			s.look(ctx, conn, r.cfg.Slot)
			sleepUntil(ctx, 200*time.Millisecond)
		}
	})
	once := sync.OnceFunc(func() { cancel(); watching.Wait() })
	r.t.Cleanup(once)
	return func() sightings { once(); return s }
}

func (s *sightings) look(ctx context.Context, conn *pgx.Conn, slot string) {
	var pid int
	var reply time.Time
	var age float64
	err := conn.QueryRow(ctx, `SELECT pid, reply_time, extract(epoch FROM clock_timestamp() - reply_time)::float8
		FROM pg_stat_replication WHERE pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1) AND reply_time IS NOT NULL`, slot).
		Scan(&pid, &reply, &age)
	if err != nil {
		return
	}
	s.samples++
	s.oldest = max(s.oldest, time.Duration(age*float64(time.Second)))
	if !slices.Contains(s.pids, pid) {
		s.pids = append(s.pids, pid)
	}
	if n := len(s.replies); n == 0 || !s.replies[n-1].Equal(reply) {
		s.replies = append(s.replies, reply)
	}
}

// lively fails the test where the walsender was another one in between, or was
// left without a standby status for nearly as long as the server bears it.
func (s sightings) lively(t *testing.T) {
	t.Helper()
	t.Logf("walsender seen %d times, with %d statuses, at most %s old", s.samples, len(s.replies), s.oldest.Round(time.Millisecond))
	if len(s.pids) != 1 || s.oldest > 9*time.Second {
		t.Errorf("the walsender did not stay and hear of the relay: %d samples, pids %v, %d statuses, oldest %s", s.samples, s.pids, len(s.replies), s.oldest)
	}
}
