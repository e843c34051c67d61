package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

const (
	slot        = "walpost"
	publication = "walpost"
	streamName  = "EVENTS"
)

// rig is a database with the outbox, a broker with the stream, and the relay's
// program.
type rig struct {
	t       *testing.T
	pg      *testenv.Postgres
	nats    *testenv.NATS
	url     string
	program string
	env     []string // beside that of every rig
	table   *outbox.Table
	source  string
	js      jetstream.JetStream
	seed    uint64
}

func newRig(t *testing.T, pg *testenv.Postgres) *rig {
	t.Helper()
	r := &rig{
		t: t, pg: pg, nats: testenv.NewNATS(t, testenv.NATSOptions{Process: true}), url: pg.NewDB(t), seed: seed(t),
		table: &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
	}
	var err error
	r.program, err = testenv.Build(t.Context(), "github.com/walpost/walpost/cmd/walpost", buildFlags...)
	r.must(err)
	if out, err := r.command("migrate", "up").CombinedOutput(); err != nil {
		t.Fatalf("walpost migrate up: %v\n%s", err, out)
	}
	r.query(`SELECT system_identifier || '/' || current_database() FROM pg_control_system()`, &r.source)
	r.createStream()
	return r
}

// seed is the test's source of all randomness, from WALPOST_SEED if it is set.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := rand.Uint64()
	if v := os.Getenv("WALPOST_SEED"); v != "" {
		var err error
		if s, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("read WALPOST_SEED: %v", err)
		}
	}
	t.Logf("WALPOST_SEED=%d", s)
	return s
}

// random is a source for one of the test's actors: what the others do does not
// change it.
func (r *rig) random(actor uint64) *rand.Rand { return rand.New(rand.NewPCG(r.seed, actor)) }

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// command is a command of the program, configured by its environment alone.
func (r *rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(r.program, args...)
	cmd.Dir = r.t.TempDir() // no walpost.yaml there
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"),
		"WALPOST_POSTGRES_URL=" + r.url, "WALPOST_SLOT=" + slot, "WALPOST_PUBLICATION=" + publication,
		"WALPOST_NATS_URL=" + r.nats.URL(), "WALPOST_STREAM=" + streamName, "WALPOST_HTTP_LISTEN=",
	}
	cmd.Env = append(cmd.Env, r.env...)
	return cmd
}

func (r *rig) createStream() {
	r.t.Helper()
	nc := testenv.ConnectNATS(r.t, r.nats.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	r.js = testenv.JetStream(r.t, nc)
	_, err := r.js.CreateStream(r.t.Context(), jetstream.StreamConfig{
		Name: streamName, Subjects: []string{"events.>"}, Discard: jetstream.DiscardNew,
	})
	r.must(err)
}

// exec runs statements in a session of their own.
func (r *rig) exec(sql string) {
	r.t.Helper()
	conn := r.connect()
	defer conn.Close(context.Background())
	_, err := conn.PgConn().Exec(r.t.Context(), sql).ReadAll()
	r.must(err)
}

// query reads one row.
func (r *rig) query(sql string, into ...any) {
	r.t.Helper()
	conn := r.connect()
	defer conn.Close(context.Background())
	r.must(conn.QueryRow(r.t.Context(), sql).Scan(into...))
}

func (r *rig) connect() *pgx.Conn {
	r.t.Helper()
	conn, err := pgx.Connect(r.t.Context(), r.url)
	r.must(err)
	return conn
}

// awaitStreaming waits until a walsender serves the relay's slot.
func (r *rig) awaitStreaming() {
	r.t.Helper()
	ok, _ := r.eventually(func(conn *pgx.Conn) (ok bool, state string, err error) {
		err = conn.QueryRow(r.t.Context(), `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND active)`, slot).Scan(&ok)
		return ok, "", err
	})
	if !ok {
		r.t.Fatal("the relay does not stream")
	}
}

// awaitSettled waits until every row is marked and everything that was written
// before the call is confirmed. Where that does not come about, the audit has
// more to say.
func (r *rig) awaitSettled() {
	r.t.Helper()
	begun := time.Now()
	var end string
	r.query(`SELECT pg_current_wal_insert_lsn()::text`, &end)
	ok, state := r.eventually(func(conn *pgx.Conn) (ok bool, state string, err error) {
		var pending int
		var confirmed string
		err = conn.QueryRow(r.t.Context(), `SELECT (SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL),
				confirmed_flush_lsn::text, confirmed_flush_lsn >= $2::text::pg_lsn
			FROM pg_replication_slots WHERE slot_name = $1`, slot, end).Scan(&pending, &confirmed, &ok)
		return ok && pending == 0, fmt.Sprintf("%d rows pending, confirmed %s of %s", pending, confirmed, end), err
	})
	if !ok {
		r.t.Errorf("not everything is settled %s after the load: %s", testenv.Patience, state)
		return
	}
	r.t.Logf("settled %s after the load: %s", time.Since(begun).Round(time.Millisecond), state)
}

func (r *rig) eventually(check func(*pgx.Conn) (ok bool, state string, err error)) (ok bool, state string) {
	r.t.Helper()
	conn := r.connect()
	defer conn.Close(context.Background())
	for deadline := time.Now().Add(testenv.Patience); !ok && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var err error
		ok, state, err = check(conn)
		r.must(err)
	}
	return ok, state
}

// audit holds the stream against the table.
func (r *rig) audit() {
	r.t.Helper()
	conn := r.connect()
	defer conn.Close(context.Background())
	rows, err := audit.ReadTable(r.t.Context(), conn, r.table, "t.payload ->> 'n'")
	r.must(err)
	var messages []audit.Message
	r.must(r.reader().Read(r.t.Context(), func(m audit.Message) { messages = append(messages, m) }))
	report := audit.Compare(rows, messages)
	r.t.Log(&report)
	if !report.Exact() {
		r.t.Error("the stream is not what the table says")
	}
}

func (r *rig) reader() *audit.Reader {
	return &audit.Reader{JetStream: r.js, Stream: streamName, Source: r.source}
}
