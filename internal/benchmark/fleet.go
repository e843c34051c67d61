package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"

	"github.com/walpost/walpost/internal/testenv"
)

// fleet is what so many databases take, each with a relay and a stream.
type fleet struct {
	Databases int `json:"databases"`
	Clusters  int `json:"postgresql_clusters"` // that they are in
	// Relay is for one relay, and PostgreSQL and NATS are for all databases together.
	Relay      usage `json:"relay"`
	PostgreSQL usage `json:"postgresql"`
	NATS       usage `json:"nats"`
	// Backends are PostgreSQL's sessions of one relay.
	Backends float64 `json:"backends"`
	// Rate is the events a second of all databases, while they have events, and Mean and P99 the time from
	// commit to PubAck; P99 is the upper limit of the histogram's bucket.
	Rate float64 `json:"rate"`
	Mean float64 `json:"mean_ms"`
	P99  float64 `json:"p99_ms"`
	// Message is what a message takes in its stream's file, in bytes.
	Message float64 `json:"bytes_per_message"`
}

// usage is of processes: memory of their own, and milliseconds of CPU time a second, idle and with events.
type usage struct {
	Bytes int64   `json:"bytes"`
	Idle  float64 `json:"idle_ms_per_s"`
	Busy  float64 `json:"busy_ms_per_s"`
}

const (
	fleetTime = 20 * time.Second
	fleetRate = 10 // events a second of a database
)

// fleets are measured one after the other: databases, and the clusters that they are in.
var fleets = [][2]int{{1, 1}, {10, 1}, {50, 1}, {50, 10}}

func measureFleets(ctx context.Context, program, folder string) error {
	var all []fleet
	for _, size := range fleets {
		f := fleet{Databases: size[0], Clusters: size[1]}
		fmt.Fprintf(os.Stderr, "fleet: %d databases in %d clusters\n", f.Databases, f.Clusters)
		if err := f.measure(ctx, program); err != nil {
			return err
		}
		all = append(all, f)
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "fleet.json"), append(text, '\n'), 0o644)
}

func (f *fleet) measure(ctx context.Context, program string) (err error) {
	broker, err := testenv.StartNATS(ctx, testenv.NATSOptions{Process: true})
	if err != nil {
		return err
	}
	defer broker.Close()
	var postgres []*testenv.Postgres
	for range f.Clusters {
		pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{FSync: true, Settings: map[string]string{
			"max_connections": "500", "max_replication_slots": "100", "max_wal_senders": "100",
			"synchronous_commit": "on", "shared_buffers": "32MB",
		}})
		if err != nil {
			return err
		}
		defer pg.Close()
		postgres = append(postgres, pg)
	}
	var members []*member
	defer func() {
		for _, m := range members {
			err = errors.Join(err, m.stop())
		}
	}()
	for n := range f.Databases {
		m, err := startMember(ctx, program, postgres[n%len(postgres)], broker.URL(), fmt.Sprintf("db%d", n))
		if err != nil {
			return err
		}
		members = append(members, m)
	}
	for _, m := range members {
		if err := m.ready(ctx); err != nil {
			return err
		}
	}
	servers := func() (pg, nats []int) {
		for _, p := range postgres {
			pg = append(pg, descendants(p.Pid())...)
		}
		return pg, []int{broker.Pid()}
	}
	var relays []int
	for _, m := range members {
		relays = append(relays, m.relay.Process.Pid)
	}
	spent := func(during func() error) (relay, pg, nats float64, err error) {
		pgs, brokers := servers()
		a, b, c := cpu(relays), cpu(pgs), cpu(brokers)
		begun := time.Now()
		if err := during(); err != nil {
			return 0, 0, 0, err
		}
		took := time.Since(begun).Seconds()
		pgs, brokers = servers()
		per := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / took }
		return per(cpu(relays)-a) / float64(len(relays)), per(cpu(pgs) - b), per(cpu(brokers) - c), nil
	}
	f.Relay.Idle, f.PostgreSQL.Idle, f.NATS.Idle, err = spent(func() error {
		select {
		case <-time.After(fleetTime):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if err != nil {
		return err
	}
	f.Relay.Busy, f.PostgreSQL.Busy, f.NATS.Busy, err = spent(func() error {
		loading, cancel := context.WithTimeout(ctx, fleetTime)
		defer cancel()
		var group errgroup.Group
		for _, m := range members {
			group.Go(func() error { return m.load(loading) })
		}
		return group.Wait()
	})
	if err != nil {
		return err
	}
	pgs, brokers := servers()
	if f.Message, err = messageSize(ctx, broker.URL(), "db0"); err != nil {
		return err
	}
	f.Relay.Bytes = memory(relays) / int64(len(relays))
	f.PostgreSQL.Bytes, f.NATS.Bytes = memory(pgs), memory(brokers)
	return f.ask(ctx, members)
}

func messageSize(ctx context.Context, url, stream string) (float64, error) {
	nc, err := nats.Connect(url)
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return 0, err
	}
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	state := s.CachedInfo().State
	return float64(state.Bytes) / float64(state.Msgs), nil
}

// ask reads the relays' own figures, and PostgreSQL's sessions of them.
func (f *fleet) ask(ctx context.Context, members []*member) error {
	var sum, count float64
	buckets := map[float64]uint64{}
	sessions := 0
	for _, m := range members {
		h, err := m.latency(ctx)
		if err != nil {
			return err
		}
		sum, count = sum+h.GetSampleSum(), count+float64(h.GetSampleCount())
		for _, b := range h.GetBucket() {
			buckets[b.GetUpperBound()] += b.GetCumulativeCount()
		}
		n := 0
		if err := m.db.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()`).Scan(&n); err != nil {
			return err
		}
		sessions += n
	}
	f.Backends = float64(sessions) / float64(len(members))
	f.Rate, f.Mean = count/fleetTime.Seconds(), 1000*sum/count
	for limit, n := range buckets {
		if float64(n) >= 0.99*count && (f.P99 == 0 || 1000*limit < f.P99) {
			f.P99 = 1000 * limit
		}
	}
	return nil
}

// member is a database with its relay.
type member struct {
	db    *pgx.Conn
	relay *exec.Cmd
	log   *os.File
	http  string
}

func startMember(
	ctx context.Context, program string, pg *testenv.Postgres, broker, name string,
) (*member, error) {
	url, err := pg.CreateDB(ctx, name)
	if err != nil {
		return nil, err
	}
	m := &member{}
	if m.http, err = testenv.TakeAddress(); err != nil {
		return nil, err
	}
	if m.db, err = pgx.Connect(ctx, url); err != nil {
		return nil, err
	}
	env := append(os.Environ(), "WALPOST_POSTGRES_URL="+url, "WALPOST_NATS_URL="+broker,
		"WALPOST_LAYOUT=append",
		"WALPOST_SLOT="+name, "WALPOST_STREAM="+name, "WALPOST_SUBJECT="+name+".{event_type}",
		"WALPOST_HTTP_LISTEN="+m.http)
	up := exec.CommandContext(ctx, program, "migrate", "up")
	up.Env = env
	if out, err := up.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("migrate: %w: %s", err, out)
	}
	if m.log, err = os.CreateTemp("", "fleet"); err != nil {
		return nil, err
	}
	m.relay = exec.Command(program, "run")
	m.relay.Env, m.relay.Stderr = env, m.log
	return m, m.relay.Start()
}

func (m *member) stop() error {
	_ = m.db.Close(context.Background())
	_ = m.relay.Process.Signal(syscall.SIGTERM)
	err := m.relay.Wait()
	return errors.Join(err, m.log.Close(), os.Remove(m.log.Name()))
}

// ready waits until the relay streams.
func (m *member) ready(ctx context.Context) error {
	for ctx.Err() == nil {
		if text, err := m.get(ctx, "/status"); err == nil && strings.Contains(text, `"streaming"`) {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return ctx.Err()
}

func (m *member) get(ctx context.Context, path string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.http+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// load inserts events one by one until ctx is done.
func (m *member) load(ctx context.Context) error {
	tick := time.NewTicker(time.Second / fleetRate)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		_, err := m.db.Exec(context.WithoutCancel(ctx), `INSERT INTO outbox_events
			(aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', '1', 'order.placed', jsonb_build_object('pad', repeat('x', 270)))`)
		if err != nil {
			return err
		}
	}
}

func (m *member) latency(ctx context.Context) (*dto.Histogram, error) {
	text, err := m.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	f := families["walpost_commit_to_ack_seconds"]
	if f == nil {
		return nil, errors.New("the relay has no walpost_commit_to_ack_seconds")
	}
	return f.GetMetric()[0].GetHistogram(), nil
}

// descendants are a process and those that it has started.
func descendants(pid int) []int {
	all := []int{pid}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	parents := map[int]int{}
	for _, file := range files {
		if s := stat(file); len(s) > 1 {
			child, _ := strconv.Atoi(strings.Split(file, "/")[2])
			parents[child], _ = strconv.Atoi(s[1])
		}
	}
	for i := 0; i < len(all); i++ {
		for child, parent := range parents {
			if parent == all[i] && !slices.Contains(all, child) {
				all = append(all, child)
			}
		}
	}
	return all
}

// stat are the fields of /proc/<pid>/stat behind the program's name.
func stat(file string) []string {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.Fields(rest)
}

// cpu is the processes' CPU time, with that of children that have ended.
func cpu(pids []int) (total time.Duration) {
	for _, pid := range pids {
		if s := stat(fmt.Sprintf("/proc/%d/stat", pid)); len(s) > 14 {
			for _, field := range s[11:15] {
				ticks, _ := strconv.Atoi(field)
				total += time.Duration(ticks) * 10 * time.Millisecond
			}
		}
	}
	return total
}

// memory is the processes' own memory, and their share of what they have in common.
func memory(pids []int) (total int64) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if rest, found := strings.CutPrefix(line, "Pss:"); found {
				kb, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
				total += kb << 10
			}
		}
	}
	return total
}
