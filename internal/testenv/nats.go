package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// natsProgram is nats-server's own, in the version of go.mod.
const natsProgram = "github.com/nats-io/nats-server/v2"

// NATSOptions are the choices for a NATS server; the zero value is an embedded
// one with JetStream.
type NATSOptions struct {
	// Process runs the server as a process of its own, which [NATS.Kill] can
	// end like a crash. It is built by the go command, for tests only.
	Process bool
	// MaxPayload in bytes; default: the server's 1 MiB.
	MaxPayload int
	// JetStream is more lines for the configuration's jetstream block, such as
	// "sync_interval: always".
	JetStream string
	// Config is more configuration text, such as an accounts or authorization
	// block.
	Config string
}

// NATS is a private server with JetStream on a loopback port. Its methods may
// be called from several goroutines, those that start and stop it from one at
// a time.
type NATS struct {
	home string // holds the configuration, the log and the store
	port int
	// command is the server's program, empty where it is embedded.
	command string

	// mu guards the fields below. One is for each form; srv is nil while
	// stopped, proc stays to be asked.
	mu   sync.Mutex
	srv  *server.Server
	proc *process
}

// StartNATS starts a server with an empty store on a free loopback port.
func StartNATS(ctx context.Context, opts NATSOptions) (*NATS, error) {
	n, err := newNATS()
	if err != nil {
		return nil, err
	}
	if opts.Process {
		if n.command, err = Build(ctx, natsProgram); err != nil {
			return nil, errors.Join(err, n.Close())
		}
	}
	if err := n.configure(opts, ""); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	if err := n.Start(ctx); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func newNATS() (*NATS, error) {
	home, err := space.mkdir("nats")
	if err != nil {
		return nil, err
	}
	port, err := takePort()
	return &NATS{home: home, port: port}, err
}

// configure writes the file that both forms of the server read. The store is
// bounded because the default is most of the disk.
func (n *NATS) configure(opts NATSOptions, cluster string) error {
	text := fmt.Sprintf(`
server_name: %q
listen: %q
log_file: %q
jetstream {
	store_dir: %q
	max_memory_store: 256MB
	max_file_store: 8GB
	%s
}
%s
%s
`, filepath.Base(n.home), loopback(n.port), n.logFile(), n.StoreDir(), opts.JetStream, opts.Config, cluster)
	if opts.MaxPayload > 0 {
		text += fmt.Sprintf("max_payload: %d\n", opts.MaxPayload)
	}
	if err := os.WriteFile(n.configFile(), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write nats-server configuration: %w", err)
	}
	return nil
}

func (n *NATS) configFile() string { return filepath.Join(n.home, "nats.conf") }
func (n *NATS) logFile() string    { return filepath.Join(n.home, "nats.log") }

// URL carries no credentials.
func (n *NATS) URL() string { return "nats://" + loopback(n.port) }

// Port is the same in every life of the server.
func (n *NATS) Port() int { return n.port }

// StoreDir is the directory of JetStream's files.
func (n *NATS) StoreDir() string { return filepath.Join(n.home, "store") }

// Log is the end of the server's log.
func (n *NATS) Log() string { return tail(n.logFile(), 16<<10) }

// Server is the embedded server, nil while it is stopped or where it is a
// process.
func (n *NATS) Server() *server.Server {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.srv
}

// Pid is the server's process id, 0 while it does not run and for one that is embedded.
func (n *NATS) Pid() int { return n.process().pid() }

func (n *NATS) process() *process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.proc
}

func (n *NATS) running() bool {
	proc := n.process()
	return n.Server() != nil || proc != nil && proc.running()
}

// Start starts the server on its store, as it is or as it was stopped or
// killed, and waits until it takes connections; the streams are there then.
func (n *NATS) Start(ctx context.Context) error {
	if n.running() {
		return nil
	}
	if n.command != "" {
		return n.startProcess(ctx)
	}
	return n.startEmbedded(ctx)
}

func (n *NATS) startEmbedded(ctx context.Context) error {
	opts, err := server.ProcessConfigFile(n.configFile())
	if err != nil {
		return fmt.Errorf("read nats-server configuration: %w", err)
	}
	opts.NoSigs = true // signals are the program's
	srv, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("start nats-server: %w", err)
	}
	srv.ConfigureLogger()
	srv.Start()
	if !srv.ReadyForConnections(timeLeft(ctx)) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return fmt.Errorf("wait for nats-server: %w\n%s", context.DeadlineExceeded, n.Log())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.srv = srv
	return nil
}

// timeLeft is for those who take a timeout instead of a context.
func timeLeft(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return time.Until(deadline)
	}
	return time.Minute
}

func (n *NATS) startProcess(ctx context.Context) error {
	cmd := exec.Command(n.command, "--config", n.configFile())
	cmd.Dir = n.home
	proc, err := startProcess(cmd, n.logFile(), syscall.SIGKILL)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.proc = proc
	n.mu.Unlock()
	for {
		err := n.greet(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-proc.done:
			return fmt.Errorf("start nats-server: %w\n%s", exitError(proc), n.Log())
		case <-ctx.Done():
			return fmt.Errorf("wait for nats-server: %w: %w\n%s", ctx.Err(), err, n.Log())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// greet waits for the server's INFO, which comes before any authentication.
func (n *NATS) greet(ctx context.Context) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp4", loopback(n.port))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	return err
}

// Stop shuts the server down and waits for its end.
func (n *NATS) Stop(ctx context.Context) error {
	n.mu.Lock()
	srv, proc := n.srv, n.proc
	n.srv = nil
	n.mu.Unlock()
	if srv != nil {
		srv.Shutdown()
		srv.WaitForShutdown()
	}
	if proc != nil && proc.running() {
		return proc.stop(ctx, syscall.SIGINT)
	}
	return nil
}

// Kill ends the server's process by SIGKILL, as a crash would.
func (n *NATS) Kill() error {
	proc := n.process()
	if proc == nil {
		return errors.New("kill nats-server: it is not a process of its own")
	}
	return proc.stop(context.Background(), syscall.SIGKILL)
}

// Pause freezes the server's process with every connection open, until
// [NATS.Resume]. It returns when the process is frozen.
func (n *NATS) Pause() error {
	if err := n.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return n.process().awaitStopped()
}

// Resume lets a paused process go on.
func (n *NATS) Resume() error { return n.signal(syscall.SIGCONT) }

func (n *NATS) signal(sig syscall.Signal) error {
	proc := n.process()
	if proc == nil {
		return errors.New("signal nats-server: it is not a process of its own")
	}
	return proc.cmd.Process.Signal(sig)
}

// Limit sets max_payload, in bytes, of a server that runs on: it tells no client.
func (n *NATS) Limit(maxPayload int) error {
	f, err := os.OpenFile(n.configFile(), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "max_payload: %d\n", maxPayload)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	const reloaded = "Reloaded server configuration"
	before := strings.Count(n.Log(), reloaded)
	if err := n.signal(syscall.SIGHUP); err != nil {
		return err
	}
	for begun := time.Now(); strings.Count(n.Log(), reloaded) == before; time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > Patience {
			return fmt.Errorf("reload nats-server: not within %s\n%s", Patience, n.Log())
		}
	}
	return nil
}

// Restart is a graceful stop and a start: same port, same store.
func (n *NATS) Restart(ctx context.Context) error {
	if err := n.Stop(ctx); err != nil {
		return err
	}
	return n.Start(ctx)
}

// SnapshotStore copies the stopped server's store to dst, which must not
// exist.
func (n *NATS) SnapshotStore(dst string) error {
	if n.running() {
		return errors.New("copy JetStream store: the server is running")
	}
	return copyTree(dst, n.StoreDir(), nil, nil)
}

// RestoreStore replaces the stopped server's store by the copy in src: what a
// broker restored from an older backup, or one that lost its page cache, would
// find.
func (n *NATS) RestoreStore(src string) error {
	if n.running() {
		return errors.New("restore JetStream store: the server is running")
	}
	if err := removeAll(n.StoreDir()); err != nil {
		return err
	}
	return copyTree(n.StoreDir(), src, nil, nil)
}

// Close ends the server and removes everything it wrote.
func (n *NATS) Close() error {
	if proc := n.process(); proc != nil {
		proc.kill()
	}
	err := n.Stop(context.Background())
	freePort(n.port)
	return errors.Join(err, removeAll(n.home))
}
