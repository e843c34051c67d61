package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// ErrNoPooler means that pgbouncer is not installed.
var ErrNoPooler = errors.New("pgbouncer is not installed")

// Pooler is a private pgbouncer on a loopback port, before one cluster.
type Pooler struct {
	home string
	port int
	proc *process
}

// StartPooler starts a pooler whose every client is the cluster's superuser.
// Settings go into the section [pgbouncer] of its configuration.
func StartPooler(ctx context.Context, pg *Postgres, settings map[string]string) (*Pooler, error) {
	program, err := findPooler()
	if err != nil {
		return nil, err
	}
	p := &Pooler{}
	if p.home, err = space.mkdir("pooler"); err != nil {
		return nil, err
	}
	if p.port, err = takePort(); err != nil {
		return nil, err
	}
	if err := p.configure(pg, settings); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	cmd := exec.Command(program, p.configFile())
	cmd.Dir, cmd.Env = p.home, serverEnv(p.home)
	pg.who.apply(cmd) // it does not run as root either
	if p.proc, err = startProcess(cmd, p.logFile(), syscall.SIGQUIT); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	if err := p.waitReady(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// findPooler also looks where distributions hide it from ordinary users.
func findPooler() (string, error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrNoPooler
}

var poolerVersion = regexp.MustCompile(`PgBouncer 1\.(\d+)`)

// PoolerReplicates reports whether the pooler lets replication connections
// through, which it does since 1.23.
func PoolerReplicates() bool {
	program, err := findPooler()
	if err != nil {
		return false
	}
	out, err := exec.Command(program, "--version").Output()
	if err != nil {
		return false
	}
	m := poolerVersion.FindSubmatch(out)
	if m == nil {
		return true // a second series
	}
	minor, err := strconv.Atoi(string(m[1]))
	return err == nil && minor >= 23
}

func (p *Pooler) configure(pg *Postgres, settings map[string]string) error {
	text := fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%d user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
`, pg.port, superuser, p.port)
	for name, value := range settings {
		text += fmt.Sprintf("%s = %s\n", name, value)
	}
	return os.WriteFile(p.configFile(), []byte(text), 0o644)
}

// waitReady only connects: a pooler logs in to the server when a client asks.
func (p *Pooler) waitReady(ctx context.Context) error {
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp4", loopback(p.port))
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.proc.done:
			return fmt.Errorf("start pgbouncer: %w\n%s", exitError(p.proc), p.Log())
		case <-ctx.Done():
			return fmt.Errorf("wait for pgbouncer: %w: %w\n%s", ctx.Err(), err, p.Log())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (p *Pooler) configFile() string { return filepath.Join(p.home, "pgbouncer.ini") }
func (p *Pooler) logFile() string    { return filepath.Join(p.home, "pgbouncer.log") }

// Port is where it listens.
func (p *Pooler) Port() int { return p.port }

// Log is the end of the pooler's log.
func (p *Pooler) Log() string { return tail(p.logFile(), 16<<10) }

// Close ends the pooler and removes everything it wrote.
func (p *Pooler) Close() error {
	if p.proc != nil {
		p.proc.kill()
	}
	freePort(p.port)
	return removeAll(p.home)
}

// NewPooler is [StartPooler] for one test. It is nil where there is no
// pgbouncer.
func NewPooler(tb testing.TB, pg *Postgres, settings map[string]string) *Pooler {
	tb.Helper()
	ctx, cancel := starting(tb)
	defer cancel()
	p, err := StartPooler(ctx, pg, settings)
	if errors.Is(err, ErrNoPooler) {
		return nil
	}
	check(tb, err)
	tb.Cleanup(func() { finish(tb, p.Log, p.Close) })
	return p
}
