package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Signal sends a signal to every process of the server, such as SIGSTOP and SIGCONT. Where there is no /proc,
// only its first process gets it.
func (p *Postgres) Signal(sig syscall.Signal) error {
	proc := p.process()
	if proc == nil || !proc.running() {
		return errors.New("signal PostgreSQL: it does not run")
	}
	first := proc.pid()
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", first))
	for _, child := range strings.Fields(string(children)) {
		if pid, err := strconv.Atoi(child); err == nil {
			_ = syscall.Kill(pid, sig) // it may have ended
		}
	}
	return syscall.Kill(first, sig)
}

// Signal sends a signal to the server's process.
func (n *NATS) Signal(sig syscall.Signal) error { return n.signal(sig) }

// awaitStopped waits until every thread of a process that was sent SIGSTOP has
// stopped: one of them may be in the middle of an answer. Where there is no
// /proc it returns at once.
func (p *process) awaitStopped() error {
	for range 1000 {
		if p.stopped() {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("freeze %s: it still runs a second after SIGSTOP", filepath.Base(p.cmd.Path))
}

func (p *process) stopped() bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	for _, name := range stats {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		// "pid (name) state ...": the name may hold anything but the last ")".
		if i := bytes.LastIndexByte(stat, ')'); i < 0 || i+2 >= len(stat) || stat[i+2] != 'T' {
			return false
		}
	}
	return true
}
