package testenv

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/testenv/pgbin"
)

const (
	superuser = "postgres"
	// confFile is included at the end of postgresql.conf, so that a setting
	// made here wins over initdb's and loses to ALTER SYSTEM.
	confFile = "testenv.conf"
	// maxSocketPath is the shortest sun_path of the systems we know (macOS);
	// Linux has four bytes more.
	maxSocketPath = 103
)

// PGOptions are the choices for a cluster; the zero value is good for tests.
type PGOptions struct {
	// BinDir holds PostgreSQL's programs. Default: [pgbin.Find].
	BinDir string
	// Settings go into the configuration, unquoted, and win over the defaults
	// of [StartPostgres].
	Settings map[string]string
	// FSync leaves fsync on. Without it a cluster survives the crash of its
	// processes, but not of the machine.
	FSync bool
	// TLS lets the server take encrypted connections. Its certificate is its own, and valid until a time, by
	// default for a day.
	TLS      bool
	TLSUntil time.Time
}

// StopMode is how PostgreSQL is asked to stop.
type StopMode syscall.Signal

const (
	// Smart waits for every client to leave.
	Smart = StopMode(syscall.SIGTERM)
	// Fast ends the clients, writes a checkpoint and waits for the walsenders
	// to have sent it.
	Fast = StopMode(syscall.SIGINT)
	// Immediate is a crash: recovery follows at the next start.
	Immediate = StopMode(syscall.SIGQUIT)
)

// Postgres is a private cluster, or a standby of one. Its methods may be
// called from several goroutines, Start and Stop from one at a time.
type Postgres struct {
	bin  pgbin.Binaries
	who  *account
	home string // holds data, the log and the socket
	port int

	// mu guards the fields below.
	mu       sync.Mutex
	settings map[string]string
	proc     *process
	serial   int
	// originals are the databases that [Postgres.CopyDB] copies, by their keys. It is nil where a cluster
	// serves one test.
	originals map[string]*original
}

// StartPostgres makes a cluster (superuser postgres, trust, UTF8, locale C,
// wal_level logical, fsync off) and starts it on a free loopback port. Where
// we are root it runs as the user postgres, or nobody.
func StartPostgres(ctx context.Context, opts PGOptions) (*Postgres, error) {
	p, err := newPostgres(ctx, opts.BinDir)
	if err != nil {
		return nil, err
	}
	p.settings = p.defaults(opts.FSync)
	if opts.TLS {
		p.settings["ssl"] = "on"
		if opts.TLSUntil.IsZero() {
			opts.TLSUntil = time.Now().Add(24 * time.Hour)
		}
	}
	maps.Copy(p.settings, opts.Settings)
	if err := p.create(ctx, opts.TLSUntil); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// newPostgres reserves what a cluster needs, but makes no data directory.
func newPostgres(ctx context.Context, binDir string) (*Postgres, error) {
	bin, err := binariesOr(binDir)
	if err != nil {
		return nil, err
	}
	who, err := serverAccount()
	if err != nil {
		return nil, err
	}
	if bin.Dir, err = space.reachable(ctx, bin.Dir, who); err != nil {
		return nil, err
	}
	home, err := space.mkdir("pg")
	if err != nil {
		return nil, err
	}
	if err := who.own(home); err != nil {
		return nil, err
	}
	port, err := takePort()
	return &Postgres{bin: bin, who: who, home: home, port: port}, err
}

func binariesOr(dir string) (pgbin.Binaries, error) {
	if dir == "" {
		return pgbin.Find()
	}
	return pgbin.In(dir)
}

func (p *Postgres) create(ctx context.Context, tlsUntil time.Time) error {
	if err := space.newDataDir(ctx, p.bin, p.Dir(), p.who); err != nil {
		return err
	}
	if err := p.include(); err != nil {
		return err
	}
	if !tlsUntil.IsZero() {
		if err := p.encrypt(tlsUntil); err != nil {
			return err
		}
	}
	return p.Start(ctx)
}

// include makes the server read confFile.
func (p *Postgres) include() (err error) {
	f, err := os.OpenFile(filepath.Join(p.Dir(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = fmt.Fprintf(f, "\ninclude '%s'\n", confFile)
	return err
}

func (p *Postgres) defaults(fsync bool) map[string]string {
	s := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    fmt.Sprint(p.port),
		"unix_socket_directories": p.socketDir(),
		"wal_level":               "logical",
		"max_wal_senders":         "20",
		"max_replication_slots":   "20",
		// Small, because clusters run side by side.
		"shared_buffers":  "32MB",
		"log_line_prefix": "%m [%p] %q%a ",
		"jit":             "off",
	}
	if !fsync {
		s["fsync"] = "off"
	}
	return s
}

// socketDir is empty where the socket's path would be too long.
func (p *Postgres) socketDir() string {
	if len(p.home)+len("/.s.PGSQL.12345.lock") > maxSocketPath {
		return ""
	}
	return p.home
}

// Port is the same in every life of the cluster.
func (p *Postgres) Port() int { return p.port }

// Dir is the data directory.
func (p *Postgres) Dir() string { return filepath.Join(p.home, "data") }

// Version is the major version.
func (p *Postgres) Version() int { return p.bin.Major }

// Binaries tells what the cluster runs on.
func (p *Postgres) Binaries() pgbin.Binaries { return p.bin }

// URL connects to a database as the superuser, over TCP.
func (p *Postgres) URL(db string) string {
	return p.URLFor(superuser, db)
}

// URLFor connects as any role: the cluster trusts every client.
func (p *Postgres) URLFor(role, db string) string {
	mode := "disable"
	if p.settings["ssl"] == "on" {
		mode = "require"
	}
	u := url.URL{
		Scheme: "postgres", User: url.User(role), Host: loopback(p.port), Path: "/" + db,
		RawQuery: "sslmode=" + mode,
	}
	return u.String()
}

// Log is the end of the server's log.
func (p *Postgres) Log() string { return tail(p.logFile(), 16<<10) }

func (p *Postgres) logFile() string { return filepath.Join(p.home, "postgres.log") }

// Pid is the postmaster's process id, 0 while it does not run.
func (p *Postgres) Pid() int { return p.process().pid() }

func (p *Postgres) process() *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proc
}

// Start starts the server, as it is or as it was stopped or crashed, and waits
// until it takes connections.
func (p *Postgres) Start(ctx context.Context) error {
	if p.Pid() != 0 {
		return nil
	}
	if err := p.writeConf(); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	cmd := exec.Command(filepath.Join(p.bin.Dir, "postgres"), "-D", p.Dir())
	cmd.Dir, cmd.Env = p.home, serverEnv(p.home)
	p.who.apply(cmd)
	proc, err := startProcess(cmd, p.logFile(), syscall.SIGQUIT)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.proc = proc
	p.mu.Unlock()
	return p.waitReady(ctx, proc)
}

// waitReady connects until it succeeds, the server ends, or ctx is done.
func (p *Postgres) waitReady(ctx context.Context, proc *process) error {
	for {
		err := p.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-proc.done:
			return fmt.Errorf("start postgres: %w\n%s", exitError(proc), p.Log())
		case <-ctx.Done():
			return fmt.Errorf("wait for postgres: %w: %w\n%s", ctx.Err(), err, p.Log())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (p *Postgres) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, p.URL("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// exitError is never nil: a server that ends by itself has failed.
func exitError(proc *process) error {
	if proc.err != nil {
		return proc.err
	}
	return errors.New("exited with status 0")
}

// Stop asks the server to stop and waits until its process is gone. When ctx
// is done first the server goes on stopping and Stop may be called again, in
// another mode too: that is how to observe a shutdown that hangs.
func (p *Postgres) Stop(ctx context.Context, mode StopMode) error {
	proc := p.process()
	if proc == nil || !proc.running() {
		return nil
	}
	return proc.stop(ctx, syscall.Signal(mode))
}

// Restart is a fast stop and a start: same port, same data.
func (p *Postgres) Restart(ctx context.Context) error {
	if err := p.Stop(ctx, Fast); err != nil {
		return err
	}
	return p.Start(ctx)
}

// Reload changes settings and returns when new sessions see them; a session
// that is open sees them before its next command. Settings that need a
// restart wait for one.
func (p *Postgres) Reload(ctx context.Context, settings map[string]string) error {
	before, err := p.loadTime(ctx)
	if err != nil {
		return fmt.Errorf("reload configuration: %w", err)
	}
	p.mu.Lock()
	maps.Copy(p.settings, settings)
	p.mu.Unlock()
	if err := p.writeConf(); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if err := p.process().cmd.Process.Signal(syscall.SIGHUP); err != nil {
		return fmt.Errorf("reload configuration: %w", err)
	}
	for {
		now, err := p.loadTime(ctx)
		if err != nil {
			return fmt.Errorf("reload configuration: %w", err)
		}
		if now.After(before) {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// loadTime asks a new session, which has the postmaster's answer.
func (p *Postgres) loadTime(ctx context.Context) (t time.Time, err error) {
	err = p.withConn(ctx, "postgres", func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "SELECT pg_conf_load_time()").Scan(&t)
	})
	return t, err
}

// CreateDB creates an empty database and returns its URL.
func (p *Postgres) CreateDB(ctx context.Context, name string) (string, error) {
	err := p.Exec(ctx, "postgres", "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	if err != nil {
		return "", fmt.Errorf("create database: %w", err)
	}
	return p.URL(name), nil
}

// Exec runs SQL, one statement or several in one implicit transaction, in a
// session of its own.
func (p *Postgres) Exec(ctx context.Context, db, sql string) error {
	return p.withConn(ctx, db, func(conn *pgx.Conn) error {
		_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
		return err
	})
}

func (p *Postgres) withConn(ctx context.Context, db string, fn func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, p.URL(db))
	if err != nil {
		return err
	}
	return errors.Join(fn(conn), conn.Close(context.WithoutCancel(ctx)))
}

// Close stops the server at once and removes everything it wrote.
func (p *Postgres) Close() error {
	if proc := p.process(); proc != nil {
		proc.kill()
	}
	freePort(p.port)
	return removeAll(p.home)
}

func (p *Postgres) writeConf() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(p.settings)) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, strings.ReplaceAll(p.settings[name], "'", "''"))
	}
	return p.writeFile(confFile, b.String())
}

// serverEnv keeps our own PG* variables, locale and home directory from
// PostgreSQL.
func serverEnv(home string) []string {
	env := []string{"HOME=" + home, "LC_ALL=C"}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}
