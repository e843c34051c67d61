package testenv

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// Patience is after what time a test takes what it waits for as hung. It is far above what a busy machine
// takes: no test passes or fails by it.
const Patience = 10 * time.Minute

// Main is the body of TestMain: it says which versions of PostgreSQL the tests
// use, runs them, stops what they left behind, and looks for leaked goroutines.
func Main(m *testing.M) {
	debug.SetGCPercent(400) // of this process alone: a tenth of its time would go into small heaps
	announce()
	// An embedded server that is closed while it makes a stream leaves that stream's.
	const server = "github.com/nats-io/nats-server/v2/server"
	goleak.VerifyTestMain(cleaned{m},
		goleak.IgnoreAnyFunction(server+".(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction(server+"/ats.Register.func1"))
}

// announce leaves a missing PostgreSQL to the tests that need it.
func announce() {
	all, err := pgbin.All()
	for _, b := range all {
		fmt.Fprintln(os.Stderr, "testenv:", b)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", describe(err))
	}
}

// cleaned ends the servers before goleak looks, and the process after it.
type cleaned struct{ m *testing.M }

func (c cleaned) Run() int {
	code := c.m.Run()
	if err := Cleanup(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return max(code, 1)
	}
	return code
}

// Clusters runs fn on a fresh cluster of the default version or of one of those named in
// WALPOST_PG_EXTRA_BINS, by turns, and in full (see [Full]) on both. The test's name decides which, so that
// between them tests are on every one. With WALPOST_PG_ALL it runs fn on every version.
func Clusters(t *testing.T, fn func(t *testing.T, pg *Postgres)) {
	t.Helper()
	ClustersWith(t, PGOptions{}, fn)
}

// ClustersWith is [Clusters] with options; their BinDir is ignored.
func ClustersWith(t *testing.T, opts PGOptions, fn func(t *testing.T, pg *Postgres)) {
	t.Helper()
	onEach(t, versions(t), opts, fn)
}

func onEach(t *testing.T, all []pgbin.Binaries, opts PGOptions, fn func(t *testing.T, pg *Postgres)) {
	t.Helper()
	for _, b := range all {
		t.Run("pg"+b.Version, func(t *testing.T) {
			opts := opts
			opts.BinDir = b.Dir
			fn(t, NewPostgres(t, opts))
		})
	}
}

// versions are those on which a test runs that depends on the version.
func versions(t *testing.T) []pgbin.Binaries {
	t.Helper()
	all, err := pgbin.All()
	check(t, err)
	if len(all) == 1 || os.Getenv("WALPOST_PG_ALL") != "" {
		return all
	}
	return Some(t, 1, all[0], oneOf(t, all[1:]))
}

// oneOf chooses by the test's name.
func oneOf(t *testing.T, all []pgbin.Binaries) pgbin.Binaries {
	h := fnv.New32a()
	_, _ = h.Write([]byte(t.Name()))
	return all[int(h.Sum32()%uint32(len(all)))]
}

// Cluster runs fn on a fresh cluster of one version: for what hardly depends on the version. The test's
// name decides which, so that between them tests are on every one. With WALPOST_PG_ALL it runs fn on every
// version.
func Cluster(t *testing.T, fn func(t *testing.T, pg *Postgres)) {
	t.Helper()
	ClusterWith(t, PGOptions{}, fn)
}

// ClusterWith is [Cluster] with options; their BinDir is ignored.
func ClusterWith(t *testing.T, opts PGOptions, fn func(t *testing.T, pg *Postgres)) {
	t.Helper()
	all, err := pgbin.All()
	check(t, err)
	if os.Getenv("WALPOST_PG_ALL") == "" {
		all = []pgbin.Binaries{oneOf(t, all)}
	}
	onEach(t, all, opts, fn)
}

// NewPostgres is [StartPostgres] for one test.
func NewPostgres(tb testing.TB, opts PGOptions) *Postgres {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	pg, err := StartPostgres(ctx, forTests(opts))
	check(tb, err)
	tb.Cleanup(func() { finish(tb, pg.Log, pg.Close) })
	return pg
}

// forTests adds a setting that saves time and that no client sees. Without fsync a cluster survives no crash
// of the machine, so whole pages in the WAL are of no use.
func forTests(opts PGOptions) PGOptions {
	settings := map[string]string{}
	if !opts.FSync {
		settings["full_page_writes"] = "off"
	}
	maps.Copy(settings, opts.Settings)
	opts.Settings = settings
	return opts
}

// SharedPostgres is the cluster that all tests of this process share, started
// for the first that asks. A test takes a database of its own with
// [Postgres.NewDB] and does not stop or reconfigure the cluster.
func SharedPostgres(tb testing.TB) *Postgres {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	pg, err := sharedPostgres(ctx)
	check(tb, err)
	return pg
}

// sharedMu makes the tests that run in parallel wait for the first one's start.
var sharedMu sync.Mutex

func sharedPostgres(ctx context.Context) (*Postgres, error) {
	sharedMu.Lock()
	defer sharedMu.Unlock()
	space.mu.Lock()
	pg := space.shared
	space.mu.Unlock()
	if pg != nil {
		return pg, nil
	}
	// With hundreds of databases autovacuum would begin a worker several times a second.
	settings := map[string]string{"autovacuum_naptime": "1h"}
	pg, err := StartPostgres(ctx, forTests(PGOptions{Settings: settings}))
	if err != nil {
		return nil, err
	}
	pg.originals = map[string]*original{}
	space.mu.Lock()
	defer space.mu.Unlock()
	space.shared = pg
	return pg, nil
}

// NewDB creates an empty database and returns its URL.
func (p *Postgres) NewDB(tb testing.TB) string {
	tb.Helper()
	p.mu.Lock()
	p.serial++
	name := fmt.Sprintf("test%d", p.serial)
	p.mu.Unlock()
	url, err := p.CreateDB(tb.Context(), name)
	check(tb, err)
	return url
}

// NewStandby is [Postgres.Standby] for one test.
func (p *Postgres) NewStandby(tb testing.TB, name string, settings map[string]string) *Postgres {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	standby, err := p.Standby(ctx, name, settings)
	check(tb, err)
	tb.Cleanup(func() { finish(tb, standby.Log, standby.Close) })
	return standby
}

// NewNATS is [StartNATS] for one test.
func NewNATS(tb testing.TB, opts NATSOptions) *NATS {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	n, err := StartNATS(ctx, opts)
	check(tb, err)
	tb.Cleanup(func() { finish(tb, n.Log, n.Close) })
	return n
}

// NewNATSCluster is [StartNATSCluster] for one test.
func NewNATSCluster(tb testing.TB, nodes int) *NATSCluster {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	c, err := StartNATSCluster(ctx, nodes, NATSOptions{})
	check(tb, err)
	tb.Cleanup(func() { finish(tb, c.Log, c.Close) })
	return c
}

// NewProxy is [StartProxy] for one test.
func NewProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	p, err := StartProxy(target)
	check(tb, err)
	tb.Cleanup(func() { check(tb, p.Close()) })
	return p
}

func starting(tb testing.TB) (context.Context, context.CancelFunc) {
	return context.WithTimeout(tb.Context(), Patience)
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(describe(err))
	}
}

// finish closes a server, and shows its log where the test has failed.
func finish(tb testing.TB, log func() string, closeServer func() error) {
	tb.Helper()
	if tb.Failed() {
		tb.Logf("server log:\n%s", log())
	}
	check(tb, closeServer())
}

func describe(err error) error {
	if advice := hint.Of(err); advice != "" {
		return errors.New(err.Error() + "\nhint: " + advice)
	}
	return err
}
