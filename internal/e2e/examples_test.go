package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

const examplesDir = "../../examples"

// example is a program of examples/insert.
type example struct {
	name    string
	dir     string
	command []string
	prepare []string // what is run before it, once
	node    bool     // it needs the modules that .ci/deps installs
}

var examples = []example{
	{name: "psql", command: []string{"psql", "--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1", "--file=insert.sql", "URL"}},
	{name: "pg", command: []string{"node", "node-pg.mjs"}, node: true},
	{
		name: "prisma", dir: "prisma", command: []string{"node", "insert.mjs"}, node: true,
		prepare: []string{"node", "../../node_modules/prisma/build/index.js", "generate", "--schema", "schema.prisma"},
	},
	// Debian's own, which has the package: another one may come first in PATH.
	{name: "psycopg", command: []string{"/usr/bin/python3", "python.py"}},
}

// TestInsertExamples: each example commits its event with the order, and neither without the other.
func TestInsertExamples(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.env = []string{"WALPOST_LAYOUT=append"}
	if out, err := r.command("migrate", "up").CombinedOutput(); err != nil {
		t.Fatalf("walpost migrate up: %v\n%s", err, out)
	}
	r.exec(`CREATE TABLE orders (id BIGINT PRIMARY KEY, state TEXT NOT NULL); INSERT INTO orders VALUES (42, 'new');
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused by the test'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION refuse();
		ALTER TABLE outbox_events DISABLE TRIGGER refuse`)
	relay := r.start()
	r.awaitStreaming()
	dir := r.copyExamples()
	want := 0
	for _, e := range examples {
		t.Run(e.name, func(t *testing.T) {
			e.need(t, dir)
			r := *r
			r.t = t
			r.runExample(e, dir)
			want++
		})
	}
	ok, state := r.eventually(func(conn *pgx.Conn) (ok bool, state string, err error) {
		var pending int
		err = conn.QueryRow(t.Context(), `SELECT count(*) FROM outbox_events_pending`).Scan(&pending)
		return pending == 0, fmt.Sprintf("%d rows pending", pending), err
	})
	if !ok {
		t.Errorf("not everything is delivered: %s", state)
	}
	stream, err := r.js.Stream(t.Context(), streamName)
	r.must(err)
	info, err := stream.Info(t.Context())
	r.must(err)
	if info.State.Msgs != uint64(want) {
		t.Errorf("%d messages in the stream, want %d", info.State.Msgs, want)
	}
	relay.stop()
}

// copyExamples puts them beside the modules of .ci/deps, where Node looks for those.
func (r *rig) copyExamples() string {
	r.t.Helper()
	dir := r.t.TempDir()
	r.must(os.CopyFS(dir, os.DirFS(examplesDir)))
	modules, err := filepath.Abs("../../.cache/examples/node_modules")
	r.must(err)
	r.must(os.Symlink(modules, filepath.Join(dir, "node_modules")))
	return dir
}

// need skips the test where what the example needs is not installed.
func (e *example) need(t *testing.T, dir string) {
	t.Helper()
	if _, err := exec.LookPath(e.command[0]); err != nil {
		t.Skipf("%s is not installed", e.command[0])
	}
	if e.node {
		if _, err := os.Stat(filepath.Join(dir, "node_modules", "pg")); err != nil {
			t.Skip("the modules are not installed: run .ci/deps examples")
		}
		return
	}
	if e.name == "psycopg" && exec.Command(e.command[0], "-c", "import psycopg").Run() != nil {
		t.Skip("psycopg is not installed: run .ci/deps examples")
	}
}

func (r *rig) runExample(e example, dir string) {
	r.t.Helper()
	run := func(command []string) (string, error) {
		args := strings.Split(strings.ReplaceAll(strings.Join(command, "\n"), "URL", r.url), "\n")
		ctx, cancel := context.WithTimeout(r.t.Context(), testenv.Patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = filepath.Join(dir, "insert", e.dir)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+r.url, "CHECKPOINT_DISABLE=1", "PRISMA_HIDE_UPDATE_MESSAGE=1",
			"PRISMA_SCHEMA_ENGINE_BINARY=/bin/true") // or generate downloads that engine, and has no use for it
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	if e.prepare != nil {
		if out, err := run(e.prepare); err != nil {
			r.t.Fatalf("prepare: %v\n%s", err, out)
		}
	}
	// The event is refused: then the order stays as it was.
	r.exec(`UPDATE orders SET state = 'new'; ALTER TABLE outbox_events ENABLE TRIGGER refuse`)
	out, err := run(e.command)
	var state string
	r.query(`SELECT state FROM orders`, &state)
	if err == nil || !strings.Contains(out, "refused by the test") || state != "new" {
		r.t.Errorf("with a refused event it ends with %v and the order is %q\n%s", err, state, out)
	}
	r.exec(`ALTER TABLE outbox_events DISABLE TRIGGER refuse`)
	if out, err = run(e.command); err != nil {
		r.t.Fatalf("%v\n%s", err, out)
	}
	var row string
	r.query(`SELECT concat_ws('|', (SELECT state FROM orders), id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
			occurred_at <= now(), coalesce(available_at::text, trace_id, 'NULL'))
		FROM outbox_events ORDER BY id DESC LIMIT 1`, &row)
	if want := `placed|` + out + `|7|order|42|order.placed|1|{"total": 1250, "currency": "EUR"}|t|NULL`; row != want {
		r.t.Errorf("row\n got %s\nwant %s", row, want)
	}
}
