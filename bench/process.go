package bench

import (
	"bytes"
	"errors"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// process is a program whose CPU time and memory are to be known.
type process struct {
	cmd  *exec.Cmd
	mu   sync.Mutex
	out  bytes.Buffer
	done chan struct{}
	err  error
}

func start(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.Stderr = p
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Write keeps the first part of what the program says.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out.Len() < 16<<10 {
		p.out.Write(b)
	}
	return len(b), nil
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// ended returns why the program has ended, nil while it runs.
func (p *process) ended() error {
	select {
	case <-p.done:
		if p.err == nil {
			return errors.New("it has ended")
		}
		return p.err
	default:
		return nil
	}
}

func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.done:
		return p.err
	case <-time.After(time.Minute):
		return errors.New("it does not end")
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// cpu and rss are known when the program has ended.
func (p *process) cpu() time.Duration {
	s := p.cmd.ProcessState
	return s.UserTime() + s.SystemTime()
}

// rss is the most memory that was resident, in bytes.
func (p *process) rss() int64 {
	if u, ok := p.cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		return u.Maxrss << 10
	}
	return 0
}
