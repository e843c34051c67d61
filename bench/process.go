package bench

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// process is a program whose CPU time and memory are measured.
type process struct {
	cmd  *exec.Cmd
	mu   sync.Mutex
	out  bytes.Buffer
	done chan struct{}
	err  error
	peak int64 // see stop
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

// Write keeps the first part of the program's output.
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

// stop ends the program. It first reads its greatest resident memory into p.peak, in bytes; 0 where the
// system does not tell. After the end, the system's figure includes the memory of the process that started
// it.
func (p *process) stop() error {
	p.peak = peak(p.cmd.Process.Pid)
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

// cpu is the program's CPU time. The program must have ended.
func (p *process) cpu() time.Duration {
	s := p.cmd.ProcessState
	return s.UserTime() + s.SystemTime()
}

func peak(pid int) int64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, after, _ := bytes.Cut(status, []byte("\nVmHWM:"))
	var kib int64
	_, _ = fmt.Sscanf(string(after), "%d kB", &kib)
	return kib << 10
}
