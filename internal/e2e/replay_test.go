package e2e

import (
	"context"
	"errors"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// TestConsumersAndReplays: a consumer takes replays where it is asked to, each once for each request, and passes over
// them otherwise. One that is rebuilt reads them from a stream of its own.
func TestConsumersAndReplays(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.exec(`CREATE TABLE effects (number BIGINT GENERATED ALWAYS AS IDENTITY, consumer TEXT, id TEXT, replay_of TEXT, n INTEGER, UNIQUE (consumer, id))`)
	relay := r.start()
	r.awaitStreaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n % 5, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 50) n`)
	r.awaitSettled()
	_, err := r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "REBUILT", Subjects: []string{"again.>"}})
	r.must(err)
	stop := r.consumers(consume.Config{Name: "plain"}, consume.Config{Name: "eager", Replays: true},
		consume.Config{Name: "rebuilt", Replays: true, Stream: "REBUILT"})

	for _, args := range [][]string{{"--all"}, {"--event-type", "order.placed"}, {"--all", "--to-stream", "REBUILT"}} {
		out, err := r.command(append([]string{"replay"}, args...)...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "done, 50 rows published again, 0 refused") {
			t.Fatalf("walpost replay %s: %v\n%s", args, err, out)
		}
	}
	ok, state := r.eventually(func(conn *pgx.Conn) (ok bool, state string, err error) {
		err = conn.QueryRow(t.Context(), `SELECT concat_ws(' ', count(*) FILTER (WHERE consumer = 'plain'), count(*) FILTER (WHERE consumer = 'eager'),
			count(*) FILTER (WHERE consumer = 'rebuilt')) FROM effects`).Scan(&state)
		return state == "50 150 50", state, err
	})
	if !ok {
		t.Errorf("the effects of plain, eager and rebuilt are %s, want 50 150 50", state)
	}
	var wrong int
	r.query(`SELECT count(*) FROM effects WHERE (replay_of = '') <> (id NOT LIKE '%/replay-%') OR replay_of <> '' AND id NOT LIKE replay_of || '/replay-%'`, &wrong)
	if wrong != 0 {
		t.Errorf("%d effects do not tell what they repeat", wrong)
	}
	r.query(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY n % 5 ORDER BY number) AS before FROM effects WHERE consumer = 'rebuilt') e WHERE n <= before`, &wrong)
	if wrong != 0 {
		t.Errorf("%d effects of the rebuilt consumer are out of order", wrong)
	}
	stop()
	if out, err := r.command("verify").CombinedOutput(); err != nil || !regexp.MustCompile(`(?m)^replays +100$`).Match(out) {
		t.Errorf("walpost verify: %v\n%s", err, out)
	}
	relay.stop()
}

// consumers runs consumers until the returned function is called.
func (r *rig) consumers(all ...consume.Config) (stop func()) {
	r.t.Helper()
	pool, err := pgxpool.New(r.t.Context(), r.url)
	r.must(err)
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, cfg := range all {
		cfg.Pool, cfg.NATS, cfg.Start, cfg.Logger = pool, nc, "all", slog.New(slog.DiscardHandler)
		running.Go(func() {
			err := consume.Run(ctx, cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
				_, err := tx.Exec(ctx, `INSERT INTO effects (consumer, id, replay_of, n) VALUES ($1, $2, $3, ($4::jsonb ->> 'n')::int)`,
					cfg.Name, e.ID, e.ReplayOf, string(e.Payload))
				return err
			})
			if err != nil && !errors.Is(err, context.Canceled) {
				r.t.Errorf("consumer %s: %v", cfg.Name, err)
			}
		})
	}
	stop = sync.OnceFunc(func() {
		cancel()
		done := make(chan struct{})
		go func() { running.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(testenv.Patience):
			r.t.Error("the consumers do not end")
		}
		nc.Close()
		pool.Close()
	})
	r.t.Cleanup(stop)
	return stop
}
