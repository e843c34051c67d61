package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

const (
	slotName   = "walpost"
	streamName = "EVENTS"
	// patience is what an effect may take on a machine that is busy with much else.
	patience = 3 * time.Minute
)

// plan is what a seed says about a world.
type plan struct {
	version  pgbin.Binaries
	replicas int
	standby  bool
	relays   int
	mode     string
	onPoison string
	backoff  time.Duration // of a row that fails
	rollback bool          // the broker's store may be rolled back
	emptied  bool          // it may be as it was in the beginning
	// window is the stream's duplicate window, shorter than most pauses: it is not
	// what keeps duplicates away.
	window time.Duration
	batch  string // what the stream allows, and the relays then do
	mark   string // of delivered rows
}

// batches are the ways to hand messages over.
var batches = []string{"single", "fast", "atomic"}

func draw(rng *rand.Rand) (p plan, err error) {
	versions, err := pgbin.All()
	if err != nil {
		return p, err
	}
	p = plan{
		version: versions[rng.IntN(len(versions))], replicas: []int{1, 1, 3}[rng.IntN(3)],
		standby: rng.IntN(3) == 0, relays: 1 + rng.IntN(2), mode: "auto",
		onPoison: []string{"hold", "hold", "skip"}[rng.IntN(3)], backoff: 50 * time.Millisecond,
		window: []time.Duration{100 * time.Millisecond, time.Second, 3 * time.Second}[rng.IntN(3)],
	}
	if rng.IntN(8) == 0 {
		p.mode = "poll"
	}
	p.rollback = p.replicas == 1 && !p.standby && rng.IntN(2) == 0
	p.batch = batches[rng.IntN(len(batches))]
	p.mark = marks[0]
	return p, nil
}

func (p *plan) String() string {
	s := fmt.Sprintf("R%d, PostgreSQL %d", p.replicas, p.version.Major)
	if p.standby {
		s += " with a standby"
	}
	s += fmt.Sprintf(", relays %d, %s, %s, window %s, %s",
		p.relays, p.mode, p.onPoison, p.window, p.batch)
	if p.journals() {
		s += ", mark " + p.mark
	}
	return s
}

// world is the servers and the relays of one run, and the ways to all of them.
type world struct {
	plan
	log      func(format string, args ...any)
	patience time.Duration
	program  string
	env      []string // of the relays

	primary, replica *testenv.Postgres // replica is nil where there is none
	promoted         atomic.Bool
	brokers          []*testenv.NATS
	cluster          *testenv.NATSCluster // nil for one broker
	db, source       string

	pgProxies, natsProxies []*testenv.Proxy
	relays                 []*relay
	dir                    string
	nc                     *nats.Conn
	js                     jetstream.JetStream
	heldBack               bool              // the walsender waits for the standby
	lossy                  atomic.Bool       // the store was rolled back, and the relay may not know yet
	losses                 atomic.Int64      // how often it was
	restored               uint64            // the stream's last sequence then
	columns                int               // that the table was altered by
	deleting               sync.RWMutex      // held while a message is being deleted
	deleted                map[string]uint64 // sequences of messages that a fault has deleted, by key
	closers                []func() error
}

func (w *world) onClose(f func() error) { w.closers = append(w.closers, f) }

func (w *world) close() error {
	var errs []error
	for i := len(w.closers) - 1; i >= 0; i-- {
		errs = append(errs, w.closers[i]())
	}
	return errors.Join(errs...)
}

// newWorld starts what a plan says.
func newWorld(ctx context.Context, p plan, program string, log func(string, ...any)) (w *world, err error) {
	w = &world{plan: p, program: program, log: log, patience: patience, deleted: map[string]uint64{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.dir, err = os.MkdirTemp("", "walpost-chaos-"); err != nil {
		return w, err
	}
	w.onClose(func() error { return os.RemoveAll(w.dir) })
	if err := w.startPostgres(ctx); err != nil {
		return w, err
	}
	const sourceSQL = `SELECT system_identifier || '/' || current_database() FROM pg_control_system()`
	if err := w.query(ctx, sourceSQL, nil, &w.source); err != nil {
		return w, err
	}
	if err := w.startBrokers(ctx); err != nil {
		return w, err
	}
	if p.emptied {
		if err := w.keepEmptyStore(ctx); err != nil {
			return w, err
		}
	}
	return w, w.startRelays(ctx)
}

func (w *world) startPostgres(ctx context.Context) (err error) {
	settings := map[string]string{
		"max_slot_wal_keep_size": "1GB", "min_wal_size": "32MB", "max_wal_size": "128MB",
		"wal_sender_timeout": "10s",
	}
	options := testenv.PGOptions{BinDir: w.version.Dir, Settings: settings}
	w.primary, err = testenv.StartPostgres(ctx, options)
	if err != nil {
		return err
	}
	w.onClose(w.primary.Close)
	w.db = "shop"
	if _, err = w.primary.CreateDB(ctx, w.db); err != nil {
		return err
	}
	servers := []*testenv.Postgres{w.primary}
	if w.standby {
		settings := map[string]string{}
		if w.version.Major >= 17 {
			settings["sync_replication_slots"] = "on"
			slots := map[string]string{"synchronized_standby_slots": "sb"}
			if err := w.primary.Reload(ctx, slots); err != nil {
				return err
			}
			w.heldBack = true
		}
		if w.replica, err = w.primary.Standby(ctx, "sb", settings); err != nil {
			return err
		}
		w.onClose(w.replica.Close)
		servers = append(servers, w.replica)
	}
	for _, s := range servers {
		if err := w.proxy(&w.pgProxies, s.Port()); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) proxy(into *[]*testenv.Proxy, port int) error {
	p, err := testenv.StartProxy(fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	w.onClose(p.Close)
	*into = append(*into, p)
	return nil
}

func (w *world) startBrokers(ctx context.Context) (err error) {
	options := testenv.NATSOptions{Process: true}
	if w.replicas == 1 {
		n, err := testenv.StartNATS(ctx, options)
		if err != nil {
			return err
		}
		w.onClose(n.Close)
		w.brokers = []*testenv.NATS{n}
	} else {
		if w.cluster, err = testenv.StartNATSCluster(ctx, w.replicas, options); err != nil {
			return err
		}
		w.onClose(w.cluster.Close)
		w.brokers = w.cluster.Nodes
	}
	var urls []string
	for _, n := range w.brokers {
		urls = append(urls, n.URL())
		if err := w.proxy(&w.natsProxies, n.Port()); err != nil {
			return err
		}
	}
	w.nc, err = nats.Connect(strings.Join(urls, ","), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond), nats.RetryOnFailedConnect(true))
	if err != nil {
		return err
	}
	w.onClose(func() error { w.nc.Close(); return nil })
	if w.js, err = jetstream.New(w.nc); err != nil {
		return err
	}
	return w.until(ctx, "the stream is created", func(ctx context.Context) error {
		_, err := w.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: streamName, Subjects: []string{"events.>"}, Duplicates: w.window,
			Discard: jetstream.DiscardNew, Replicas: w.replicas, AllowDirect: true,
			AllowBatchPublish: w.batch == "fast", AllowAtomicPublish: w.batch == "atomic",
		})
		return err
	})
}

// until repeats what fails.
func (w *world) until(ctx context.Context, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	for {
		try, stop := context.WithTimeout(ctx, 5*time.Second)
		err := do(try)
		stop()
		if err == nil {
			return nil
		}
		if !sleep.For(ctx, 100*time.Millisecond) {
			return fmt.Errorf("waited in vain: %s: %w", what, err)
		}
	}
}

// server is the present primary.
func (w *world) server() *testenv.Postgres {
	if w.promoted.Load() {
		return w.replica
	}
	return w.primary
}

func (w *world) connect(ctx context.Context) (*pgx.Conn, error) {
	return pgx.Connect(ctx, w.server().URL(w.db))
}

// query reads one row from the present primary.
func (w *world) query(ctx context.Context, sql string, args []any, into ...any) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	return conn.QueryRow(ctx, sql, args...).Scan(into...)
}

func (w *world) exec(ctx context.Context, sql string, args ...any) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	_, err = conn.Exec(ctx, sql, args...)
	return err
}

// relay is one relay, kept running as a supervisor does.
type relay struct {
	w        *world
	command  func() *exec.Cmd
	log      string
	clock    string     // the file that says how far its wall clock is off
	up       sync.Mutex // held by who starts it, and by who keeps it down
	life     *testenv.Program
	stopping bool
	stuck    atomic.Bool // it did not end when it was told to
	starts   int
	peak     atomic.Int64 // see testenv.Program.Peak
	done     chan struct{}
}

func (w *world) startRelays(ctx context.Context) error {
	migrate := exec.CommandContext(ctx, w.program, "migrate", "up")
	migrate.Dir = w.dir
	migrate.Env = []string{"WALPOST_POSTGRES_URL=" + w.primary.URL(w.db)}
	if out, err := migrate.CombinedOutput(); err != nil {
		return fmt.Errorf("walpost migrate up: %w\n%s", err, out)
	}
	if err := w.exec(ctx, w.fitSQL()); err != nil {
		return err
	}
	var hosts, brokers []string
	for _, p := range w.pgProxies {
		hosts = append(hosts, p.Addr())
	}
	for _, p := range w.natsProxies {
		brokers = append(brokers, "nats://"+p.Addr())
	}
	const query = "?sslmode=disable&target_session_attrs=read-write"
	w.env = []string{
		"PATH=" + os.Getenv("PATH"),
		"WALPOST_POSTGRES_URL=postgres://postgres@" + strings.Join(hosts, ",") + "/" + w.db + query,
		"WALPOST_NATS_URL=" + strings.Join(brokers, ","),
		"WALPOST_SLOT=" + slotName, "WALPOST_STREAM=" + streamName, "WALPOST_HTTP_LISTEN=",
		"WALPOST_MARK=" + w.mark, "WALPOST_MODE=" + w.mode, "WALPOST_FALLBACK_INTERVAL=1s",
		"WALPOST_FALLBACK_BACKOFF=" + w.backoff.String(), "WALPOST_FALLBACK_MAX_ATTEMPTS=2",
		"WALPOST_FALLBACK_ON_POISON=" + w.onPoison,
	}
	for i := range w.plan.relays {
		r := &relay{
			w: w, done: make(chan struct{}),
			log:   filepath.Join(w.dir, fmt.Sprintf("relay-%d.log", i)),
			clock: filepath.Join(w.dir, fmt.Sprintf("clock-%d", i)),
		}
		r.command = func() *exec.Cmd {
			cmd := exec.Command(w.program, "run", "--log-format", "console")
			cmd.Dir, cmd.Env = w.dir, append(slices.Clone(w.env), clockFile+"="+r.clock)
			return cmd
		}
		if err := r.start(); err != nil {
			return err
		}
		go r.keep()
		w.relays = append(w.relays, r)
		w.onClose(r.kill)
	}
	return nil
}

func (r *relay) start() (err error) {
	r.starts++
	r.life, err = testenv.StartProgram(r.command(), r.log)
	return err
}

func (r *relay) keep() {
	defer close(r.done)
	for {
		r.up.Lock()
		life := r.life
		r.up.Unlock()
		for running := true; running; {
			select {
			case <-life.Done():
				running = false
			case <-time.After(100 * time.Millisecond):
				r.peak.Store(max(r.peak.Load(), life.Peak()))
			}
		}
		time.Sleep(50 * time.Millisecond)
		r.up.Lock()
		if r.stopping {
			r.up.Unlock()
			return
		}
		if r.life == life {
			if err := r.start(); err != nil {
				r.w.log("%v", err)
			}
		}
		r.up.Unlock()
	}
}

// dump has it write into its log what its goroutines are at.
func (r *relay) dump() {
	r.up.Lock()
	life := r.life
	r.up.Unlock()
	_ = life.Signal(syscall.SIGQUIT)
	select {
	case <-life.Done():
	case <-time.After(5 * time.Second):
	}
}

// kill ends it for good.
func (r *relay) kill() error {
	r.up.Lock()
	r.stopping = true
	err := r.life.Kill()
	r.up.Unlock()
	<-r.done
	return err
}
