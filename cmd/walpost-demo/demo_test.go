package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// lastLine is the contract with programs.
var lastLine = regexp.MustCompile(`^walpost-demo: committed=(\d+) stored=(\d+) lost=0 duplicated=0 reordered=0 p50=\d+\.\d\dms p99=\d+\.\d\dms$`)

// program is the demo as a process, in a temporary directory of its own.
type program struct {
	t      *testing.T
	tmp    string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Scanner
	stderr bytes.Buffer
	lines  []string
}

func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(openDir(t), "walpost-demo")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", bin, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return bin
}

// openDir is a directory that every user can reach and write to, which one below
// $TMPDIR need not be.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "walpost-demo-")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	check(t, os.Chmod(dir, 0o777))
	return dir
}

func start(t *testing.T, bin string, change func(*exec.Cmd), args ...string) *program {
	t.Helper()
	p := &program{t: t, tmp: openDir(t), cmd: exec.Command(bin, args...)}
	p.cmd.Env = append(os.Environ(), "TMPDIR="+p.tmp)
	p.cmd.Stderr = &p.stderr
	var err error
	p.stdin, err = p.cmd.StdinPipe()
	check(t, err)
	out, err := p.cmd.StdoutPipe()
	check(t, err)
	p.stdout = bufio.NewScanner(out)
	if change != nil {
		change(p.cmd)
	}
	check(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		p.leavesNothing()
		if t.Failed() {
			t.Logf("standard output:\n%s\nstandard error:\n%s", strings.Join(p.lines, "\n"), p.stderr.String())
		}
	})
	return p
}

// until reads up to a line that matches.
func (p *program) until(pattern string) string {
	p.t.Helper()
	want := regexp.MustCompile(pattern)
	for p.stdout.Scan() {
		p.lines = append(p.lines, p.stdout.Text())
		if found := want.FindString(p.stdout.Text()); found != "" {
			return found
		}
	}
	p.t.Fatalf("no line like %s", pattern)
	return ""
}

// wait returns the last line and the exit code.
func (p *program) wait() (string, int) {
	p.t.Helper()
	for p.stdout.Scan() {
		p.lines = append(p.lines, p.stdout.Text())
	}
	_ = p.cmd.Wait() // says the exit code once more
	if len(p.lines) == 0 {
		return "", p.cmd.ProcessState.ExitCode()
	}
	return p.lines[len(p.lines)-1], p.cmd.ProcessState.ExitCode()
}

// succeeds checks a good end, with these warnings and no others, a line each, and
// returns what was committed and stored.
func (p *program) succeeds(warnings ...string) (committed, stored int) {
	p.t.Helper()
	line, code := p.wait()
	m := lastLine.FindStringSubmatch(line)
	if code != 0 || m == nil {
		p.t.Fatalf("exit code %d, last line %q", code, line)
	}
	if got := p.stderr.String(); strings.Count(got, "\n") != len(warnings) {
		p.t.Errorf("standard error:\n%s", got)
	}
	for _, want := range warnings {
		if !strings.Contains(p.stderr.String(), want) {
			p.t.Errorf("standard error does not say %q:\n%s", want, p.stderr.String())
		}
	}
	_, err := fmt.Sscan(m[1]+" "+m[2], &committed, &stored)
	check(p.t, err)
	if committed == 0 {
		p.t.Errorf("nothing was committed")
	}
	return committed, stored
}

// leavesNothing waits, because after SIGKILL the janitor needs a moment.
func (p *program) leavesNothing() {
	p.t.Helper()
	var left []string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		left, _ = filepath.Glob(filepath.Join(p.tmp, "*"))
		left = append(left, processes(p.tmp)...)
		if len(left) == 0 {
			return
		}
	}
	p.t.Errorf("left behind: %q", left)
}

// processes whose command line names the directory, where there is /proc.
func processes(dir string) []string {
	var found []string
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range all {
		if b, err := os.ReadFile(f); err == nil && bytes.Contains(b, []byte(dir)) {
			found = append(found, string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	return found
}

func TestDemo(t *testing.T) {
	bin := build(t)
	t.Run("whole", func(t *testing.T) {
		p := start(t, bin, nil, "--duration", "2s")
		if committed, stored := p.succeeds(); committed != stored {
			t.Errorf("%d committed, %d stored", committed, stored)
		}
	})
	t.Run("unprivileged", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("the other tests are")
		}
		p := start(t, bin, func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			cmd.Env, cmd.Dir = append(cmd.Env, "HOME=/"), "/"
		}, "--duration", "1s")
		p.succeeds()
	})
	t.Run("interrupted", func(t *testing.T) { interrupted(t, bin) })
	t.Run("kept", func(t *testing.T) { kept(t, bin) })
	t.Run("killed", func(t *testing.T) {
		p := start(t, bin, nil, "--duration", "1m")
		p.until(`1s  committed`)
		check(t, p.cmd.Process.Kill())
	})
	t.Run("without PostgreSQL", func(t *testing.T) {
		p := start(t, bin, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "WALPOST_PG_BIN=/nowhere") })
		p.fails(exitFailed, "error: read WALPOST_PG_BIN: ", "hint: install the PostgreSQL server (Debian, Ubuntu: apt-get install postgresql;")
	})
	t.Run("wrong usage", func(t *testing.T) {
		for _, args := range [][]string{{"--rate", "0"}, {"--duration", "0s"}, {"--duration", "soon"}, {"--nonsense"}, {"5"}} {
			start(t, bin, nil, args...).fails(exitUsage, "error: ", "hint: walpost-demo --help lists the flags")
		}
	})
}

func (p *program) fails(code int, texts ...string) {
	p.t.Helper()
	if _, got := p.wait(); got != code {
		p.t.Errorf("exit code %d, want %d", got, code)
	}
	for _, want := range texts {
		if !strings.Contains(p.stderr.String(), want) {
			p.t.Errorf("standard error does not say %q:\n%s", want, p.stderr.String())
		}
	}
}

// The first SIGINT ends the load, and the summary follows.
func interrupted(t *testing.T, bin string) {
	p := start(t, bin, nil, "--duration", "1h", "--keep")
	p.until(`1s  committed`)
	check(t, p.cmd.Process.Signal(os.Interrupt))
	p.succeeds()
}

// What is inserted by hand arrives and is counted.
func kept(t *testing.T, bin string) {
	p := start(t, bin, nil, "--duration", "1s", "--keep", "--rate", "100")
	p.until(`^walpost-demo: `)
	url := p.until(`postgres://\S+`)
	p.until(`nats://127\.0\.0\.1:\d+`)
	p.until(`Ctrl-C ends it`)
	const insert = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.returned', '{}')`
	conn, err := pgx.Connect(t.Context(), url)
	check(t, err)
	_, err = conn.Exec(t.Context(), insert)
	check(t, err)
	p.until(`order\.returned  order/1  \d+\.\d\dms  {}`)
	_, err = fmt.Fprintln(p.stdin)
	check(t, err)
	p.until(`order\.[a-z]+  order/\d+  \d+\.\d\dms  {"step": \d`)
	_, err = conn.Exec(t.Context(), strings.ReplaceAll(insert, "order.returned", "not a subject *"))
	check(t, err)
	check(t, conn.Close(context.WithoutCancel(t.Context())))
	check(t, p.cmd.Process.Signal(os.Interrupt))
	if committed, stored := p.succeeds(`"class": "subject"`); committed != stored+1 {
		t.Errorf("%d committed, %d stored: want all but the row that cannot be delivered", committed, stored)
	}
	if !strings.Contains(strings.Join(p.lines, "\n"), "held back            1") {
		t.Error("the row that was refused is not mentioned")
	}
}
