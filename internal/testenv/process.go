package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// process is a child of ours: a server that stays in the foreground, is known
// to the workspace and the janitor, and is reaped as soon as it ends.
type process struct {
	cmd *exec.Cmd
	// abort ends the process without ceremony but takes its children along.
	abort syscall.Signal
	// done is closed when the process has been reaped; err is set before.
	done chan struct{}
	err  error
}

// startProcess starts cmd with its output appended to logFile. The context is
// not kept: a server outlives the call that started it.
func startProcess(cmd *exec.Cmd, logFile string, abort syscall.Signal) (*process, error) {
	out, err := os.OpenFile(logFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// A ^C at the terminal is for the program, which stops its servers when it
	// is done with them.
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(cmd.Path), err)
	}
	p := &process{cmd: cmd, abort: abort, done: make(chan struct{})}
	if err := space.adopt(p); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	go p.reap()
	return p, nil
}

func (p *process) reap() {
	p.err = p.cmd.Wait()
	space.release(p)
	close(p.done)
}

// pid is 0 where the process does not run, or p is nil.
func (p *process) pid() int {
	if p == nil || !p.running() {
		return 0
	}
	return p.cmd.Process.Pid
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// stop sends sig and waits for the process to end. When ctx is done first the
// process is left to finish what it is doing.
func (p *process) stop(ctx context.Context, sig syscall.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", filepath.Base(p.cmd.Path), err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to stop: %w", filepath.Base(p.cmd.Path), ctx.Err())
	}
}

// kill ends the process, by SIGKILL where its own way out takes too long.
func (p *process) kill() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	// A process that is stopped by SIGSTOP takes no other signal.
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	if p.stop(ctx, p.abort) != nil {
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

func (p *process) pidFile(dir string) string {
	return filepath.Join(dir, "pid", fmt.Sprintf("%d.%d", p.abort, p.cmd.Process.Pid))
}

func (w *workspace) adopt(p *process) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dir == "" {
		return errors.New("adopt process: the workspace has been cleaned up")
	}
	if err := os.WriteFile(p.pidFile(w.dir), nil, 0o600); err != nil {
		return fmt.Errorf("adopt process: %w", err)
	}
	w.children[p] = struct{}{}
	return nil
}

func (w *workspace) release(p *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.children, p)
	if w.dir != "" {
		_ = os.Remove(p.pidFile(w.dir))
	}
}
