package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// process is the program `walpost run`, for what cannot be seen from inside:
// signals, exit codes and resident memory.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	prog *testenv.Program
	log  string // its file
	http string // its address
}

// launch starts the relay of the rig's configuration as a process of its own, with
// more environment variables. It has the places where a test may crash it.
func (r *rig) launch(env ...string) *process {
	r.t.Helper()
	cmd := r.command("run")
	cmd.Env = append(cmd.Env, env...)
	return r.launchAs(cmd)
}

// command is one of the program, with the servers of the rig.
func (r *rig) command(args ...string) *exec.Cmd {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Minute)
	defer cancel()
	// Without the race detector, which would multiply the memory.
	path, err := testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost", "-tags=crashpoints")
	r.must(err)
	cmd := exec.Command(path, args...)
	cmd.Dir = r.t.TempDir()
	cmd.Env = []string{
		"WALPOST_POSTGRES_URL=" + r.url, "WALPOST_SLOT=" + r.cfg.Slot, "WALPOST_NATS_URL=" + r.nats.URL(),
		"WALPOST_HTTP_LISTEN=127.0.0.1:0", "WALPOST_LOG_FORMAT=json",
	}
	return cmd
}

// launchAs starts a relay by a command.
func (r *rig) launchAs(cmd *exec.Cmd) *process {
	r.t.Helper()
	p := &process{t: r.t, cmd: cmd, log: filepath.Join(cmd.Dir, "walpost.log")}
	var err error
	p.prog, err = testenv.StartProgram(p.cmd, p.log)
	r.must(err)
	r.t.Cleanup(func() {
		r.must(p.signal(syscall.SIGCONT))
		r.must(p.prog.Kill())
		if r.t.Failed() {
			r.t.Logf("log of process %d:\n%s", p.cmd.Process.Pid, p.logTail())
		}
	})
	listening := regexp.MustCompile(`"http":"([0-9.:]+)"`)
	eventually(r.t, "the relay listens for HTTP", func() bool {
		text, _ := os.ReadFile(p.log)
		if m := listening.FindSubmatch(text); m != nil {
			p.http = string(m[1])
		}
		return p.http != "" || p.ended()
	})
	return p
}

func (p *process) logTail() []byte {
	text := p.logText()
	return text[max(0, len(text)-16<<10):]
}

func (p *process) logText() []byte {
	text, _ := os.ReadFile(p.log)
	return text
}

func (p *process) ended() bool {
	select {
	case <-p.prog.Done():
		return true
	default:
		return false
	}
}

func (p *process) signal(sig syscall.Signal) error { return p.prog.Signal(sig) }

// kill is a crash.
func (p *process) kill() {
	p.t.Helper()
	if err := p.prog.Kill(); err != nil {
		p.t.Fatal(err)
	}
}

// terminate is SIGTERM, after which the program has to end with exit code 0.
func (p *process) terminate() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	if err := p.prog.Stop(ctx); err != nil {
		p.t.Fatal(err)
	}
	if err := p.prog.Err(); err != nil {
		p.t.Fatalf("SIGTERM ended the relay with %v", err)
	}
}

// get asks the relay's HTTP server; code 0 is no answer.
func (p *process) get(path string) (code int, body []byte) {
	client := http.Client{Timeout: 2 * time.Second}
	defer client.CloseIdleConnections()
	reply, err := client.Get("http://" + p.http + path)
	if err != nil {
		return 0, nil
	}
	defer reply.Body.Close()
	body, _ = io.ReadAll(reply.Body)
	return reply.StatusCode, body
}

// state is what /status says, "" where it says nothing.
func (p *process) state() string {
	_, body := p.get("/status")
	var status struct{ State string }
	_ = json.Unmarshal(body, &status)
	return status.State
}

// setAside are the outboxes that /status says are set aside.
func (p *process) setAside() []relay.SetAside {
	_, body := p.get("/status")
	var status relay.Status
	_ = json.Unmarshal(body, &status)
	return status.SetAside
}

func (p *process) awaitState(want string) *process {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("process %d is %s", p.cmd.Process.Pid, want), func() bool { return p.state() == want })
	return p
}

func (p *process) ready() bool {
	code, _ := p.get("/readyz")
	return code == http.StatusOK
}

var memoryPeak = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// peak is the greatest resident memory so far, in bytes.
func (p *process) peak() int {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	m := memoryPeak.FindSubmatch(status)
	if m == nil {
		p.t.Fatal("/proc tells no VmHWM")
	}
	kb, _ := strconv.Atoi(string(m[1]))
	return kb << 10
}

func mib(bytes int) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// needsProc skips a test that measures memory where the system does not tell.
func needsProc(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/proc/self/status"); err != nil {
		t.Skip("resident memory is read from /proc")
	}
}
