package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/examples/shop"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

const streamName = "EVENTS"

// conductor runs the shop: servers, the relay, the service and three consumers.
type conductor struct {
	options
	out      io.Writer
	pg       *testenv.Postgres
	nats     *testenv.NATS
	url      string
	pool     *pgxpool.Pool // its own, for the counts
	nc       *nats.Conn
	js       natsjs.JetStream
	provider *provider
	charges  *httptest.Server
	service  string // its URL
	dir      string // of the logs

	mu      sync.Mutex // guards the processes, one fault at a time
	running map[string]*process
	faults  map[string]int
	// recreated is when the stream was, the first time included.
	recreated time.Time
}

// process is one that is started again whenever it ends.
type process struct {
	command func() *exec.Cmd
	program *testenv.Program
}

func run(ctx context.Context, o options, out io.Writer) (v verdict, err error) {
	c := &conductor{
		options: o, out: out, running: map[string]*process{}, faults: map[string]int{}, recreated: time.Now(),
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.start(ctx); err != nil {
		return v, err
	}
	c.say("clients place %d orders, and things break meanwhile", o.orders)
	begun := time.Now()
	breaking, stop := context.WithCancel(ctx)
	var broken sync.WaitGroup
	broken.Go(func() { c.breakThings(breaking) })
	load := newLoad(c.service)
	broken.Go(func() { c.watch(breaking, load) })
	err = load.run(ctx, o)
	stop()
	broken.Wait()
	if err != nil {
		return v, err
	}
	took := time.Since(begun).Round(time.Second)
	c.say("%d orders are placed after %s, %d faults:", o.orders, took, c.total())
	for _, name := range slices.Sorted(maps.Keys(c.faults)) {
		c.say("  %-18s %4d", name, c.faults[name])
	}
	return c.judge(ctx, load)
}

// mostBehind is how many events the slowest consumer may be behind, or rows the relay, before clients wait. A
// stream that is recreated loses what was not consumed, and that is all stored again.
const mostBehind = 10_000

// watch has the clients wait while somebody is behind.
func (c *conductor) watch(ctx context.Context, l *load) {
	defer l.waits.Store(false)
	for sleep.For(ctx, 200*time.Millisecond) {
		if behind, err := c.behind(ctx); err == nil { // else something is broken, or being mended
			l.waits.Store(behind > mostBehind)
		}
	}
}

func (c *conductor) behind(ctx context.Context) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := c.js.Stream(ctx, streamName)
	if err != nil {
		return 0, err
	}
	err = c.pool.QueryRow(ctx, `SELECT greatest(
			$1 - (SELECT coalesce(min(last_processed_id), 0) FROM consumer_offsets),
			(SELECT count(*) FROM (SELECT FROM outbox_messages WHERE processed_at IS NULL LIMIT $2) x))::int`,
		s.CachedInfo().State.LastSeq, mostBehind+1).Scan(&n)
	return n, err
}

func (c *conductor) say(format string, args ...any) { fmt.Fprintf(c.out, format+"\n", args...) }

// start brings up the servers, then the processes.
func (c *conductor) start(ctx context.Context) (err error) {
	if c.dir = c.logs; c.dir == "" {
		if c.dir, err = os.MkdirTemp("", "walpost-shop-"); err != nil {
			return err
		}
	} else if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return err
	}
	if c.walpost == "" {
		c.say("building walpost")
		if c.walpost, err = testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost"); err != nil {
			return err
		}
	}
	if err := c.startServers(ctx); err != nil {
		return err
	}
	c.say("PostgreSQL %s on 127.0.0.1:%d, NATS on 127.0.0.1:%d",
		c.pg.Binaries().Version, c.pg.Port(), c.nats.Port())
	c.provider = &provider{charges: map[string]int{}}
	c.charges = httptest.NewServer(c.provider)
	if err := c.processes(); err != nil {
		return err
	}
	for _, p := range c.running {
		if err := p.start(c.dir); err != nil {
			return err
		}
	}
	c.say("order service on %s, walpost, read model, payment, audit log", c.service)
	return nil
}

func (c *conductor) startServers(ctx context.Context) (err error) {
	settings := map[string]string{"shared_buffers": "256MB", "max_wal_size": "4GB"}
	c.pg, err = testenv.StartPostgres(ctx, testenv.PGOptions{FSync: true, Settings: settings})
	if err != nil {
		return err
	}
	if c.nats, err = testenv.StartNATS(ctx, testenv.NATSOptions{Process: true}); err != nil {
		return err
	}
	if c.url, err = c.pg.CreateDB(ctx, "shop"); err != nil {
		return err
	}
	cfg, err := pgx.ParseConfig(c.url)
	if err != nil {
		return err
	}
	m := migrations.New(cfg, []*outbox.Table{{
		Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
	}})
	defer m.Close() //nolint:errcheck // nothing is buffered
	if _, err := m.Up(ctx, migrations.Latest); err != nil {
		return err
	}
	if err := c.pg.Exec(ctx, "shop", shop.Schema); err != nil {
		return err
	}
	if c.pool, err = pgxpool.New(ctx, c.url); err != nil {
		return err
	}
	c.nc, err = nats.Connect(c.nats.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		return err
	}
	if c.js, err = natsjs.New(c.nc); err != nil {
		return err
	}
	return c.createStreams(ctx)
}

// createStreams makes the stream of the events. The other one keeps the account's directory: nats-server
// removes that some time after the last stream's deletion, which makes a creation fail.
func (c *conductor) createStreams(ctx context.Context) error {
	_, err := c.js.CreateStream(ctx, natsjs.StreamConfig{Name: "OTHER", Subjects: []string{"other"}})
	if err == nil {
		err = c.createStream(ctx)
	}
	return err
}

func (c *conductor) createStream(ctx context.Context) error {
	_, err := c.js.CreateStream(ctx, natsjs.StreamConfig{
		Name: streamName, Subjects: []string{"events.>"}, Discard: natsjs.DiscardNew, AllowDirect: true,
		AllowBatchPublish: true, Duplicates: 100 * time.Millisecond,
	})
	return err
}

// processes are the shop's.
func (c *conductor) processes() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	address, err := testenv.TakeAddress()
	if err != nil {
		return err
	}
	c.service = "http://" + address
	for name := range parts {
		c.running[name] = &process{command: func() *exec.Cmd {
			cmd := exec.Command(self, name)
			cmd.Env = append(os.Environ(), envPostgres+"="+c.url, envNATS+"="+c.nats.URL(),
				envListen+"="+address, envProvider+"="+c.charges.URL)
			return cmd
		}}
	}
	c.running["relay"] = &process{command: func() *exec.Cmd { return c.walpostCommand("run") }}
	return nil
}

func (c *conductor) walpostCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(c.walpost, args...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(),
		"WALPOST_POSTGRES_URL="+c.url, "WALPOST_NATS_URL="+c.nats.URL(), "WALPOST_HTTP_LISTEN=")
	return cmd
}

func (p *process) start(dir string) (err error) {
	cmd := p.command()
	log := filepath.Join(dir, filepath.Base(cmd.Path)+"-"+cmd.Args[1]+".log")
	p.program, err = testenv.StartProgram(cmd, log)
	return err
}

// revive starts the processes again that have ended.
func (c *conductor) revive() error {
	for name, p := range c.running {
		select {
		case <-p.program.Done():
			if err := p.start(c.dir); err != nil {
				return fmt.Errorf("start the %s: %w", name, err)
			}
		default:
		}
	}
	return nil
}

func (c *conductor) total() (n int) {
	for _, times := range c.faults {
		n += times
	}
	return n
}

func (c *conductor) close() error {
	var err error
	for _, p := range c.running {
		if p.program != nil {
			err = errors.Join(err, p.program.Kill())
		}
	}
	if c.charges != nil {
		c.charges.Close()
	}
	if c.nc != nil {
		c.nc.Close()
	}
	if c.pool != nil {
		c.pool.Close()
	}
	if c.nats != nil {
		err = errors.Join(err, c.nats.Close())
	}
	if c.pg != nil {
		err = errors.Join(err, c.pg.Close())
	}
	if c.logs == "" && c.dir != "" {
		err = errors.Join(err, os.RemoveAll(c.dir))
	}
	return err
}
