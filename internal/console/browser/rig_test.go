package browser

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// rig is a database, a broker, the relay between them, and a producer that does not stop.
type rig struct {
	t       *testing.T // of the part that runs
	whole   *testing.T // what is started ends with it
	nats    *testenv.NATS
	url     string
	program string
	address string // the relay's HTTP server
	db      *pgx.Conn
	relay   *testenv.Program

	chromium context.Context
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, whole: t}
	var err, buildErr error
	var build sync.WaitGroup
	build.Go(func() {
		r.program, buildErr = testenv.Build(t.Context(), "github.com/walpost/walpost/cmd/walpost", "-ldflags=-s -w -X main.version=v1.0.0")
	})
	t.Cleanup(build.Wait)
	r.url = testenv.SharedPostgres(t).NewDB(t)
	r.nats = testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r.chromium = startChromium(t)
	build.Wait()
	r.must(buildErr)
	r.address, err = testenv.TakeAddress()
	r.must(err)
	if out, err := r.command("migrate", "up").CombinedOutput(); err != nil {
		t.Fatalf("walpost migrate up: %v\n%s", err, out)
	}
	r.db, err = pgx.Connect(t.Context(), r.url)
	r.must(err)
	t.Cleanup(func() { _ = r.db.Close(context.Background()) })
	r.startRelay()
	r.background("insert events", func(ctx context.Context) error {
		db, err := pgx.Connect(ctx, r.url)
		if err != nil {
			return err
		}
		defer db.Close(context.Background())
		return insert(ctx, db)
	})
	r.background("consume", r.consume)
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(r.program, args...)
	cmd.Dir = r.whole.TempDir() // no walpost.yaml there
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "WALPOST_POSTGRES_URL=" + r.url, "WALPOST_NATS_URL=" + r.nats.URL(),
		"WALPOST_HTTP_LISTEN=" + r.address, "WALPOST_HTTP_UI=true", "WALPOST_FALLBACK_MAX_ATTEMPTS=1",
		"WALPOST_FALLBACK_INTERVAL=1s", "WALPOST_FALLBACK_BACKOFF=1s",
	}
	return cmd
}

// startRelay returns when the relay streams.
func (r *rig) startRelay() {
	r.t.Helper()
	log := filepath.Join(r.whole.TempDir(), "relay.log")
	relay, err := testenv.StartProgram(r.command("run"), log)
	r.must(err)
	r.relay = relay
	r.whole.Cleanup(func() {
		_ = relay.Kill()
		if text, err := os.ReadFile(log); r.whole.Failed() && err == nil {
			r.whole.Logf("the relay's log ends with:\n%s", text[max(0, len(text)-4000):])
		}
	})
	r.until("the relay streams", func() bool { return strings.Contains(r.status(), `"streaming"`) })
}

// status is what the relay says, or "" where it cannot be asked.
func (r *rig) status() string {
	defer http.DefaultClient.CloseIdleConnections()
	response, err := http.Get("http://" + r.address + "/status")
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return ""
	}
	return string(text)
}

func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: not within %s", what, patience)
		}
	}
}

// startUI runs `walpost ui` and returns the address that it prints, with the token.
func (r *rig) startUI() string {
	r.t.Helper()
	log := filepath.Join(r.t.TempDir(), "ui.log")
	ui, err := testenv.StartProgram(r.command("ui"), log)
	r.must(err)
	r.t.Cleanup(func() { _ = ui.Kill() })
	var address string
	r.until("walpost ui prints its address", func() bool {
		text, err := os.ReadFile(log)
		r.must(err)
		address = printed.FindString(string(text))
		return address != ""
	})
	return address
}

var printed = regexp.MustCompile(`http://[^/]+/ui/#token=\w+`)

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	_, err := r.db.Exec(r.t.Context(), sql, args...)
	r.must(err)
}

// background runs what lasts until the test ends.
func (r *rig) background(what string, run func(context.Context) error) {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t := r.t
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", what, err)
		}
	})
}

// consume is a consumer of orders.
func (r *rig) consume(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, r.url)
	if err != nil {
		return err
	}
	defer pool.Close()
	nc, err := nats.Connect(r.nats.URL(), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	return consume.Run(ctx, consume.Config{
		Name: "billing", Pool: pool, NATS: nc, Filters: []string{"events.order.*"}, Start: "all", Partitions: 4, Logger: slog.New(slog.DiscardHandler),
	}, func(context.Context, pgx.Tx, consume.Event) error { return nil })
}

// insert writes the events of a shop.
func insert(ctx context.Context, db *pgx.Conn) error {
	pause := 100.0 // milliseconds
	if *update {   // pictures of a busy relay
		pause = 20
	}
	types := []string{"order.placed", "order.paid", "order.shipped", "invoice.created", "customer.moved"}
	for n := 0; ; n++ {
		kind := types[n%len(types)]
		payload := fmt.Sprintf(`{"order": %d, "total": %d, "currency": "EUR", "lines": [{"sku": "A-%d", "quantity": %d}]}`, n/5, 900+n%700, n%97, 1+n%4)
		_, err := db.Exec(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1 + g % 7, split_part($1, '.', 1), $2 + g, $1, $3::jsonb FROM generate_series(1, $4::int) g`, kind, n, payload, 4+n%5)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(pause+pause/2*math.Sin(float64(n)/600)) * time.Millisecond): // a load that changes
		}
	}
}
