package bench_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/bench"
	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestBench measures little, and sees that there are figures of everything and that
// nothing is left behind.
func TestBench(t *testing.T) {
	runs := testenv.Size(t, 1, 2)
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	program, err := testenv.Build(t.Context(), "github.com/walpost/walpost/cmd/walpost")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "bench", "--postgres-url", pg.URL("postgres"), "--nats-url", n.URL(),
		"--rows", "3000", "--per-transaction", "100", "--runs", fmt.Sprint(runs), "--shards", "1,2", "--cost", "2000", "--latency", "50", "--producers", "2", "--retained", "4000", "--for", "1s", "--json")
	cmd.Dir = t.TempDir()
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("walpost bench: %v\n%s\n%s", err, out, said.Bytes())
	}
	var r bench.Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Drains) != 17 || len(r.Notes) > 0 {
		t.Fatalf("%d drains, %q: want the source, four sinks, and three marks, with batches and without, of one relay and two", len(r.Drains), r.Notes)
	}
	for _, d := range r.Drains {
		if rate := d.Rate(); len(d.Runs) != runs || rate <= 0 || math.IsInf(rate, 0) {
			t.Errorf("%s: %d runs, %f rows/s", d.Name, len(d.Runs), rate)
		}
	}
	relay := r.Drains[slices.IndexFunc(r.Drains, func(d *bench.Drain) bool { return d.Name == "walpost, mark update" })].Runs[0]
	if relay.Rows != 3000 || relay.Relay <= 0 || relay.RSS <= 0 || relay.Postgres <= 0 || relay.Broker <= 0 {
		t.Errorf("a drain: %+v", relay)
	}
	if len(r.Costs) != 3 {
		t.Errorf("costs: %+v", r.Costs)
	}
	for _, c := range r.Costs {
		if c.WAL < c.Insert+c.Relay || c.Insert < int64(c.Rows)*300 || c.Relay < 0 || c.CPU <= 0 || c.Size <= 0 {
			t.Errorf("a cost: %+v", c)
		}
	}
	if len(r.Latencies) != 3 {
		t.Errorf("latencies: %+v", r.Latencies)
	}
	for _, l := range r.Latencies {
		if l.PubAck.Count < 40 || l.Consumer.Count < 40 || l.PubAck.P50 <= 0 {
			t.Errorf("a latency: %+v", l)
		}
	}
	if len(r.Producing) != 3 {
		t.Errorf("producing: %+v", r.Producing)
	}
	for _, p := range r.Producing {
		if p.Off <= 0 || p.On <= 0 || p.Sessions != 2 {
			t.Errorf("producing: %+v", p)
		}
	}
	if len(r.Retained) != 3 {
		t.Errorf("retained: %+v", r.Retained)
	}
	for _, x := range r.Retained {
		if last := x.Sizes[len(x.Sizes)-1]; x.Rows != 4000 || x.Took <= 0 || last.Rows != 4000 || last.Outbox < 8192 || last.Journal < 8192 || x.Mark != "journal" && x.Dead < 4000 {
			t.Errorf("retained: %+v", x)
		}
	}

	conn, err := pgx.Connect(t.Context(), pg.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var left int
	err = conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_database WHERE datname = $1)::int + (SELECT count(*) FROM pg_replication_slots)::int`, bench.Database).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d databases and slots are left: %v", left, err)
	}
	nc := testenv.ConnectNATS(t, n.URL())
	defer nc.Close()
	js := testenv.JetStream(t, nc)
	if _, err := js.Stream(t.Context(), bench.Stream); err == nil {
		t.Error("the stream is left")
	}
}
