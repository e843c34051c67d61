package consume_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

var soakEvents = flag.Int("events", 3000, "how many events TestKilledUnderLoad stores")

// The environment of a process that consumes: see runChild.
const (
	childURL  = "WALPOST_TEST_CONSUME"
	childNATS = "WALPOST_TEST_CONSUME_NATS"
)

// runChild is a process of the consumer. Some handlers take long, and some fail.
func runChild(url string) {
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	nc, err := nats.Connect(os.Getenv(childNATS), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.RetryOnFailedConnect(true))
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	cfg := consume.Config{
		Name: "soak", Pool: pool, NATS: nc, Start: "all", Partitions: 6, Batch: 1 + rand.IntN(20), Backoff: 20 * time.Millisecond,
		MaxAttempts: 1000, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	go runPlain(ctx, nc, pool)
	err = consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
		for _, e := range events {
			if err := effect(ctx, tx, e); err != nil {
				return err
			}
		}
		if rand.IntN(50) == 0 {
			time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
		}
		if rand.IntN(200) == 0 {
			return errors.New("bad luck")
		}
		return nil
	})
	fmt.Fprintln(os.Stderr, "Run returned", err)
	os.Exit(1)
}

// runPlain consumes the same stream in the usual way, beside.
func runPlain(ctx context.Context, nc *nats.Conn, pool *pgxpool.Pool) {
	js, err := jetstream.New(nc)
	if err != nil {
		panic(err)
	}
	insert := strings.Replace(insertSQL, "effects", "plain_effects", 1)
	for ; ; time.Sleep(100 * time.Millisecond) { // it ends where the server or the consumer is gone
		_ = plain(ctx, js, pool, insert)
	}
}

// soak is a load, processes that handle it, and faults.
type soak struct {
	*rig
	pg *testenv.Postgres

	mu     sync.Mutex // guards below: one fault at a time
	child  []*exec.Cmd
	stored int // events that the stream has, without those that a rollback took
	faults map[string]int
}

// TestKilledUnderLoad: processes, servers and connections end at any time, and the stream is rolled back and
// recreated. Each event takes effect once, in the order of its aggregate.
func TestKilledUnderLoad(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	s := &soak{rig: rigOn(t, pg, testenv.NATSOptions{Process: true}), pg: pg, faults: map[string]int{}}
	s.createStream(func(c *jetstream.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
	s.exec(`CREATE TABLE plain_effects (LIKE effects INCLUDING ALL)`)
	for range 3 {
		s.child = append(s.child, s.begin())
	}
	t.Cleanup(func() {
		for _, c := range s.child {
			s.kill(c)
		}
	})
	over := make(chan bool)
	var working sync.WaitGroup
	working.Go(func() { s.load(over) })
	for {
		select {
		case <-over:
		case <-time.After(time.Duration(100+rand.IntN(400)) * time.Millisecond):
			s.fault()
			continue
		}
		break
	}
	working.Wait()
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if n := s.tryText(`SELECT count(*) FROM effects`); n == fmt.Sprint(*soakEvents) {
			break
		} else if time.Since(begun) > testenv.Patience/5 {
			t.Fatalf("%s effects, want %d", n, *soakEvents)
		}
	}
	time.Sleep(time.Second) // for a second effect
	s.is(`SELECT count(*) FROM effects`, fmt.Sprint(*soakEvents))
	s.ordered()
	s.is(`SELECT count(*) FROM consumer_parked`, "0")
	t.Logf("%d events, faults: %v, attempts after a failure: %s, epochs: %s", *soakEvents, s.faults,
		s.text(`SELECT count(*) FROM effects WHERE attempt > 1`), s.text(`SELECT sum(epoch) FROM consumer_offsets`))
	t.Logf("a plain pull consumer beside it: %s duplicated, %s out of order", s.text(`SELECT count(*) - count(DISTINCT event_id) FROM plain_effects`),
		s.text(strings.Replace(`SELECT count(*) FROM (`+outOfOrder+`) x WHERE late`, "effects", "plain_effects", 1)))
}

func (s *soak) begin() *exec.Cmd {
	s.t.Helper()
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this test's program
	cmd.Env = append(os.Environ(), childURL+"="+s.url, childNATS+"="+s.nats.URL())
	cmd.Stderr = s.log
	s.must(cmd.Start())
	return cmd
}

func (s *soak) kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// load stores the events, in order, again from where a rollback has put the stream.
func (s *soak) load(over chan<- bool) {
	defer close(over)
	for {
		s.mu.Lock()
		n := s.stored + 1
		if n > *soakEvents {
			s.mu.Unlock()
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		_, err := s.js.PublishMsg(ctx, message(fmt.Sprint(n), fmt.Sprintf("a%d", n%50), "order.placed"))
		cancel()
		if err == nil {
			s.stored = n
		}
		s.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

// fault does one of them.
func (s *soak) fault() {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx := context.Background()
	i := rand.IntN(len(s.child))
	faults := []struct {
		name string
		do   func() error
	}{
		{"process killed", func() error { s.kill(s.child[i]); s.child[i] = s.begin(); return nil }},
		{"process killed", func() error { s.kill(s.child[i]); s.child[i] = s.begin(); return nil }},
		{"process frozen", func() error { return s.freeze(s.child[i]) }},
		{"backends ended", func() error { _ = s.tryText(endSQL, rand.IntN(3)); return nil }},
		{"backends ended", func() error { _ = s.tryText(endSQL, rand.IntN(3)); return nil }},
		{"NATS killed", func() error { return errors.Join(s.nats.Kill(), s.nats.Start(ctx)) }},
		{"PostgreSQL crashed", func() error { return errors.Join(s.pg.Stop(ctx, testenv.Immediate), s.pg.Start(ctx)) }},
		{"stream rolled back", s.rollBack},
		{"stream recreated", s.recreate},
	}
	f := faults[rand.IntN(len(faults))]
	if rand.IntN(4) > 0 && (f.name == "stream rolled back" || f.name == "stream recreated") {
		return // each takes ten seconds to be sure of
	}
	s.faults[f.name]++
	if err := f.do(); err != nil {
		s.t.Errorf("%s: %v", f.name, err)
	}
}

// endSQL ends some of the consumers' connections, among them those with locks.
const endSQL = `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
	WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid % 3 = $1`

func (s *soak) freeze(cmd *exec.Cmd) error {
	err := cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond)
	return errors.Join(err, cmd.Process.Signal(syscall.SIGCONT))
}

// rollBack restores the stream of a moment before.
func (s *soak) rollBack() error {
	ctx, backup := context.Background(), s.t.TempDir()+"/store"
	kept := s.stored
	err := errors.Join(s.nats.Stop(ctx), s.nats.SnapshotStore(backup), s.nats.Start(ctx))
	for range 20 {
		if err == nil {
			_, err = s.js.PublishMsg(ctx, message(fmt.Sprint(s.stored+1), fmt.Sprintf("a%d", (s.stored+1)%50), "order.placed"))
			if s.stored++; s.stored >= *soakEvents {
				break
			}
		}
	}
	time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
	err = errors.Join(err, s.nats.Stop(ctx), s.nats.RestoreStore(backup), s.nats.Start(ctx))
	s.stored = kept
	return err
}

// recreate makes an empty stream, into which all events come again.
func (s *soak) recreate() error {
	err := s.js.DeleteStream(context.Background(), "EVENTS")
	_, created := s.js.CreateStream(context.Background(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
	// What took effect already need not be stored again, but some of it is.
	first, wrong := strconv.Atoi(s.tryText(`SELECT coalesce(min(n), $1::integer) FROM generate_series(1, $1::integer) n
		WHERE n::text NOT IN (SELECT event_id FROM effects)`, max(s.stored, 1)))
	s.stored = max(0, first-100)
	return errors.Join(err, created, wrong)
}

// tryText is a query's result, or its error.
func (s *soak) tryText(sql string, args ...any) (text string) {
	conn, err := pgx.Connect(context.Background(), s.url)
	if err == nil {
		defer conn.Close(context.Background()) //nolint:errcheck // it may have ended itself
		err = conn.QueryRow(context.Background(), "SELECT ("+sql+")::text", args...).Scan(&text)
	}
	if err != nil {
		return err.Error()
	}
	return text
}

// BenchmarkTakeover measures the time from a process's end until another one has all partitions.
func BenchmarkTakeover(b *testing.B) {
	s := &soak{rig: newRig(b)}
	s.exec(`CREATE TABLE plain_effects (LIKE effects INCLUDING ALL)`)
	const owned = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) GROUP BY pid ORDER BY count DESC LIMIT 1`
	x := s.begin()
	defer func() { s.kill(x) }()
	var longest time.Duration
	for b.Loop() {
		b.StopTimer()
		y := s.begin()
		s.waitFor(owned, "3")
		b.StartTimer()
		begun := time.Now()
		s.kill(x)
		s.waitFor(owned, "6")
		longest = max(longest, time.Since(begun))
		x = y
	}
	b.ReportMetric(float64(longest.Milliseconds()), "longest-ms")
}
