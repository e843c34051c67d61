package drill_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/drill"
	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// rig is a staging system: servers, the program, and a relay that a supervisor would keep running.
type rig struct {
	t       *testing.T
	pg      *testenv.Postgres
	nats    *testenv.NATS
	program string
	dir     string
	db      string
	env     []string
	relay   *testenv.Program
	cmd     *exec.Cmd // of the relay
	js      natsjs.JetStream
}

func newRig(t *testing.T, pg *testenv.Postgres) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	program, err := testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost")
	r := &rig{t: t, pg: pg, nats: testenv.NewNATS(t, testenv.NATSOptions{Process: true}), program: program, dir: t.TempDir()}
	r.must(err)
	url := pg.NewDB(t)
	r.db = url[strings.LastIndex(url, "/")+1:]
	r.db, _, _ = strings.Cut(r.db, "?")
	r.env = []string{
		"PATH=" + os.Getenv("PATH"), "WALPOST_POSTGRES_URL=" + url, "WALPOST_NATS_URL=" + r.nats.URL(),
		"WALPOST_HTTP_LISTEN=", "WALPOST_SLOT=" + r.db, "WALPOST_FALLBACK_INTERVAL=1s",
	}
	nc := testenv.ConnectNATS(r.t, r.nats.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	r.js = testenv.JetStream(r.t, nc)
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
	cmd.Dir, cmd.Env = r.dir, r.env
	return cmd
}

// walpost runs a command that must succeed.
func (r *rig) walpost(args ...string) {
	r.t.Helper()
	if out, err := r.command(args...).CombinedOutput(); err != nil {
		r.t.Fatalf("walpost %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// allow has the database say that it may be broken.
func (r *rig) allow() {
	r.exec(fmt.Sprintf(`ALTER DATABASE %s SET drill.allow = %[1]s`, r.db))
}

func (r *rig) exec(sql string) {
	r.t.Helper()
	r.must(r.try(sql))
}

func (r *rig) try(sql string) error {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, r.pg.URL(r.db))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// start starts a relay and waits until it has the lock.
func (r *rig) start() {
	r.t.Helper()
	log := filepath.Join(r.dir, fmt.Sprintf("relay-%d.log", time.Now().UnixNano()))
	r.cmd = r.command("run", "--log-format", "json")
	relay, err := testenv.StartProgram(r.cmd, log)
	r.must(err)
	r.relay = relay
	r.t.Cleanup(func() {
		r.must(relay.Kill())
		if r.t.Failed() {
			text, _ := os.ReadFile(log)
			r.t.Logf("%s:\n%s", log, text[max(0, len(text)-8000):])
		}
	})
	for deadline := time.Now().Add(testenv.Patience); ; time.Sleep(20 * time.Millisecond) {
		text, _ := os.ReadFile(log)
		if bytes.Contains(text, []byte(`"streaming"`)) || bytes.Contains(text, []byte(`"polling`)) {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatal("the relay does not begin to work")
		}
	}
}

// outcome is what a drill has printed, and its exit code.
type outcome struct {
	drill.Report
	code           int
	stdout, stderr string
}

// drill runs one to its end.
func (r *rig) drill(args ...string) outcome {
	r.t.Helper()
	return r.await(r.begin(append([]string{"--json", "--yes", "--for", "4s"}, args...)...))
}

// running is a drill that has begun.
type running struct {
	cmd            *exec.Cmd
	stdout, stderr *bytes.Buffer
}

func (r *rig) begin(args ...string) *running {
	r.t.Helper()
	x := &running{cmd: r.command(append([]string{"drill"}, args...)...), stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}}
	x.cmd.Stdout, x.cmd.Stderr = x.stdout, x.stderr
	r.must(x.cmd.Start())
	r.t.Cleanup(func() { _ = x.cmd.Process.Signal(syscall.SIGKILL) })
	return x
}

func (r *rig) await(x *running) (o outcome) {
	r.t.Helper()
	err := x.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		o.code = exit.ExitCode()
	} else {
		r.must(err)
	}
	o.stdout, o.stderr = x.stdout.String(), x.stderr.String()
	r.t.Logf("exit code %d\n%s%s", o.code, o.stderr, o.stdout)
	if strings.HasPrefix(o.stdout, "{") {
		r.must(json.Unmarshal([]byte(o.stdout), &o.Report))
	}
	return o
}

var outboxTable = &outbox.Table{Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical()}

// compare is an independent count of everything.
func (r *rig) compare() audit.Report {
	r.t.Helper()
	ctx := r.t.Context()
	conn, err := pgx.Connect(ctx, r.pg.URL(r.db))
	r.must(err)
	defer conn.Close(ctx) //nolint:errcheck // it was only read
	rows, err := audit.ReadTable(ctx, conn, outboxTable, "t.id")
	r.must(err)
	var source string
	r.must(conn.QueryRow(ctx, `SELECT system_identifier || '/' || current_database() FROM pg_control_system()`).Scan(&source))
	var messages []audit.Message
	reader := &audit.Reader{JetStream: r.js, Stream: "EVENTS", Source: source}
	r.must(reader.Read(ctx, func(m audit.Message) { messages = append(messages, m) }))
	return audit.Compare(rows, messages)
}

// agrees sees that a drill which had the system for itself says what the count says.
func (r *rig) agrees(o outcome) {
	r.t.Helper()
	c := r.compare()
	r.t.Logf("counted: %s", c.String())
	e := o.Events
	if e.Committed != c.Rows || e.Stored != c.Rows-c.Lost.Count {
		r.t.Errorf("the drill says %d committed, %d stored; counted %d, %d", e.Committed, e.Stored, c.Rows, c.Rows-c.Lost.Count)
	}
	for _, x := range []struct {
		what string
		says int64
		is   int
	}{{"lost", o.Lost, c.Lost.Count}, {"duplicated", o.Duplicated, c.Duplicated.Count}, {"reordered", o.Reordered, c.Reordered.Count}} {
		if x.says != int64(x.is) {
			r.t.Errorf("the drill says %s %d, counted %d", x.what, x.says, x.is)
		}
	}
}

func (r *rig) fine(o outcome) {
	r.t.Helper()
	r.agrees(o)
	if o.code != 0 || !o.OK || !o.Recovered || o.Again == nil || o.CaughtUp == nil || o.Injected == nil || len(o.Steps) == 0 || o.Events.Stored < 50 {
		r.t.Errorf("exit code %d, report %+v", o.code, o.Report)
	}
	if o.Again != nil && (*o.Again <= 0 || *o.CaughtUp < *o.Again) {
		r.t.Errorf("delivers again after %s, caught up after %s", *o.Again, *o.CaughtUp)
	}
}

func (r *rig) pid() int { return r.cmd.Process.Pid }

// stored waits until the stream has so many messages.
func (r *rig) stored(n uint64) {
	r.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); ; time.Sleep(20 * time.Millisecond) {
		s, err := r.js.Stream(r.t.Context(), "EVENTS")
		if err == nil && s.CachedInfo().State.Msgs >= n {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%d messages were not stored: %v", n, err)
		}
	}
}

// query reads one value, "" where there is no row.
func (r *rig) query(sql string) string {
	r.t.Helper()
	ctx := r.t.Context()
	conn, err := pgx.Connect(ctx, r.pg.URL(r.db))
	r.must(err)
	defer conn.Close(ctx) //nolint:errcheck // it was only read
	var v any
	if err := conn.QueryRow(ctx, sql).Scan(&v); errors.Is(err, pgx.ErrNoRows) {
		return ""
	} else if err != nil {
		r.t.Fatal(err)
	}
	return fmt.Sprint(v)
}
