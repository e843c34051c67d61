package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

// relay is a checkout's program on private servers, built so that it counts what runs.
type relay struct {
	process *testenv.Program
	conn    *pgx.Conn
	link    *testenv.Proxy // to NATS
	dir     string         // holds the program, its log and the counters
	written int            // how many times the program has written its counters
	last    counts
}

const countersRoom = "internal/hint"

// countersSource has the program write its counters at each SIGUSR1, into a directory that appears when it is
// complete. It stands in a package that is not counted, since `go tool cover` sees no overlay.
const countersSource = `package hint

import (
	"fmt"
	"os"
	"os/signal"
	"runtime/coverage"
	"syscall"
)

func init() {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		for n := 1; ; n++ {
			<-asked
			dir := fmt.Sprintf("%s/counters%d", os.Getenv("GOCOVERDIR"), n)
			for _, err := range []error{
				os.Mkdir(dir+".new", 0o755), coverage.WriteMetaDir(dir + ".new"),
				coverage.WriteCountersDir(dir + ".new"), os.Rename(dir+".new", dir),
			} {
				if err != nil {
					panic(err)
				}
			}
		}
	}()
}
`

// start returns when the relay has delivered some rows from the WAL.
func (r *relay) start(ctx context.Context, c *checkout) (err error) {
	if r.dir, err = os.MkdirTemp("", "walpost-measure-"); err != nil {
		return err
	}
	program, err := c.build(ctx, r.dir)
	if err != nil {
		return err
	}
	environment, err := r.startServers(ctx)
	if err != nil {
		return err
	}
	migrate := exec.CommandContext(ctx, program, "migrate", "up")
	migrate.Env = environment
	if out, err := migrate.CombinedOutput(); err != nil {
		return fmt.Errorf("migrate: %w\n%s", err, out)
	}
	run := exec.Command(program, "run")
	run.Env = environment
	if r.process, err = testenv.StartProgram(run, filepath.Join(r.dir, "log")); err != nil {
		return err
	}
	for range 10 {
		if err := errors.Join(r.insert(ctx), r.marked(ctx)); err != nil {
			return err
		}
	}
	r.last, err = r.counters(ctx)
	return err
}

// build leaves the checkout as it is: the source that writes the counters is laid over it.
func (c *checkout) build(ctx context.Context, dir string) (string, error) {
	folder, err := filepath.Abs(c.folder)
	if err != nil {
		return "", err
	}
	source, overlay := filepath.Join(dir, "counters.go"), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(source, []byte(countersSource), 0o600); err != nil {
		return "", err
	}
	replace := map[string]string{filepath.Join(folder, countersRoom, "counters_measured.go"): source}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return "", err
	}
	built := filepath.Join(dir, "walpost")
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-cover", "-covermode=atomic",
		"-coverpkg="+c.counted(), "-overlay="+overlay, "-o", built, "./"+program)
	cmd.Dir = folder
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", program, err, out)
	}
	return built, nil
}

// counted are the packages of production, for -coverpkg.
func (c *checkout) counted() string {
	var paths []string
	for _, p := range c.packages {
		if p.group == production && p.room != countersRoom {
			paths = append(paths, p.ImportPath)
		}
	}
	return strings.Join(paths, ",")
}

func (r *relay) startServers(ctx context.Context) (environment []string, err error) {
	pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{})
	if err != nil {
		return nil, err
	}
	n, err := testenv.StartNATS(ctx, testenv.NATSOptions{})
	if err != nil {
		return nil, err
	}
	if r.link, err = testenv.StartProxy(strings.TrimPrefix(n.URL(), "nats://")); err != nil {
		return nil, err
	}
	if r.conn, err = pgx.Connect(ctx, pg.URL("postgres")); err != nil {
		return nil, err
	}
	return append(os.Environ(),
		"GOCOVERDIR="+r.dir, "WALPOST_HTTP_LISTEN=",
		"WALPOST_POSTGRES_URL="+pg.URL("postgres"), "WALPOST_NATS_URL=nats://"+r.link.Addr(),
	), nil
}

// stop leaves the servers to testenv.
func (r *relay) stop() {
	if r.process != nil {
		_ = r.process.Kill()
	}
	if r.conn != nil {
		_ = r.conn.Close(context.Background())
	}
	if r.link != nil {
		_ = r.link.Close()
	}
	if r.dir != "" {
		_ = os.RemoveAll(r.dir)
	}
}

// pause is more than the relay takes to send a row or to mark it.
const pause = 100 * time.Millisecond

// rounds are what ran in each round until the PubAcks were let through, and after it.
type rounds struct{ before, after []counts }

// round does something while the PubAcks are held back, and lets them through.
func (r *relay) round(ctx context.Context, do func() error, ran *rounds) error {
	r.link.Pause()
	if err := do(); err != nil {
		return err
	}
	time.Sleep(pause)
	sent, err := r.counters(ctx)
	if err != nil {
		return err
	}
	r.link.Resume()
	if err := r.marked(ctx); err != nil {
		return err
	}
	time.Sleep(pause)
	marked, err := r.counters(ctx)
	if err != nil {
		return err
	}
	ran.before = append(ran.before, sent.since(r.last))
	ran.after = append(ran.after, marked.since(sent))
	r.last = marked
	return nil
}

func (r *relay) insert(ctx context.Context) error {
	_, err := r.conn.Exec(ctx, `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'account', 1, 'account.moved', '{"n": 1}')`)
	return err
}

// marked waits until no row is pending.
func (r *relay) marked(ctx context.Context) error {
	return r.until(ctx, "rows are marked", func() (done bool, err error) {
		err = r.conn.QueryRow(ctx, `
			SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&done)
		return done, err
	})
}

// counters asks the program for its counters.
func (r *relay) counters(ctx context.Context) (counts, error) {
	r.written++
	dir := filepath.Join(r.dir, fmt.Sprintf("counters%d", r.written))
	if err := r.process.Signal(syscall.SIGUSR1); err != nil {
		return nil, err
	}
	if err := r.until(ctx, "counters are written", func() (bool, error) {
		_, err := os.Stat(dir)
		return err == nil, nil
	}); err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	return readCounts(ctx, dir)
}

func (r *relay) until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	for {
		if ok, err := done(); err != nil || ok {
			return err
		}
		select {
		case <-r.process.Done():
			log, _ := os.ReadFile(filepath.Join(r.dir, "log"))
			return fmt.Errorf("the relay has ended before %s: %w\n%s", what, r.process.Err(), log)
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}
