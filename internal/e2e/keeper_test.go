package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// keeper keeps a relay running, as a supervisor does: one that has ended is
// started again.
type keeper struct {
	*rig
	dir string
	// expected is an alarm that the test provokes; no other may be raised.
	expected string
	done     chan struct{}

	// up is held by who starts the relay, and by who wants it to stay down.
	up       sync.Mutex
	life     *testenv.Program // guarded by up
	lives    int              // guarded by up
	killed   bool             // guarded by up: the life that is ending was killed
	stopping bool             // guarded by up

	gaveUp atomic.Int64 // lives that ended by themselves, at their start
}

// keep starts the relay. At the test's end it is stopped, if it was not before,
// and its logs are looked through for alarms other than the expected one.
func (r *rig) keep(expected string) *keeper {
	r.t.Helper()
	k := &keeper{rig: r, dir: r.t.ArtifactDir(), expected: expected, done: make(chan struct{})}
	r.must(k.start())
	go k.run()
	r.t.Cleanup(func() {
		k.end((*testenv.Program).Kill)
		k.readLogs()
	})
	return k
}

func (k *keeper) run() {
	defer close(k.done)
	for {
		k.up.Lock()
		life, log := k.life, k.logFile()
		k.up.Unlock()
		<-life.Done()
		k.up.Lock()
		if k.stopping {
			k.up.Unlock()
			return
		}
		if !k.killed {
			k.gaveUp.Add(1)
			k.judgeExit(log, life.Err())
		}
		k.up.Unlock()
		time.Sleep(50 * time.Millisecond)
		k.restart()
	}
}

func (k *keeper) restart() {
	k.up.Lock()
	defer k.up.Unlock()
	if k.stopping {
		return
	}
	if err := k.start(); err != nil {
		k.t.Error(err)
		k.stopping = true
	}
}

func (k *keeper) start() error {
	life, err := testenv.StartProgram(k.command("run", "--log-format", "json"), k.nextLog())
	if err != nil {
		return err
	}
	k.life, k.killed = life, false
	return nil
}

func (k *keeper) nextLog() string {
	k.lives++
	return k.logFile()
}

func (k *keeper) logFile() string {
	return filepath.Join(k.dir, fmt.Sprintf("relay-%03d.log", k.lives))
}

// judgeExit: a relay may give up at its start only, where a server is away.
func (k *keeper) judgeExit(log string, err error) {
	b, _ := os.ReadFile(log)
	if strings.Contains(string(b), "active: this relay holds the lock") || !strings.Contains(string(b), "error: ") {
		k.t.Errorf("the relay has ended by itself: %v\n%s", err, end(string(b)))
	}
}

// kill kills the relay and keeps it down until meanwhile returns. It reports
// false where there is no relay to be killed at the moment.
func (k *keeper) kill(meanwhile func()) bool {
	k.up.Lock()
	defer k.up.Unlock()
	select {
	case <-k.life.Done():
		return false
	default:
	}
	k.killed = true
	if err := k.life.Kill(); err != nil {
		k.t.Errorf("kill the relay: %v", err)
	}
	meanwhile()
	return true
}

// freeze stops the relay in its tracks until meanwhile returns.
func (k *keeper) freeze(meanwhile func()) {
	k.up.Lock()
	life := k.life
	k.up.Unlock()
	if err := life.Signal(syscall.SIGSTOP); err != nil {
		k.t.Errorf("freeze the relay: %v", err)
	}
	meanwhile()
	if err := life.Signal(syscall.SIGCONT); err != nil {
		k.t.Errorf("let the relay go on: %v", err)
	}
}

// stop asks the relay to end, which it does in peace.
func (k *keeper) stop() {
	k.t.Helper()
	err := k.end(func(p *testenv.Program) error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return p.Stop(ctx)
	})
	if err == nil {
		err = k.life.Err()
	}
	if err != nil {
		k.t.Errorf("stop the relay: %v", err)
	}
}

func (k *keeper) end(how func(*testenv.Program) error) error {
	k.up.Lock()
	k.stopping = true
	err := how(k.life)
	k.up.Unlock()
	<-k.done
	return err
}

// readLogs looks for what no run of the relay may ever say. Where the test has
// failed it shows how the last lives went.
func (k *keeper) readLogs() {
	logs, err := filepath.Glob(filepath.Join(k.dir, "relay-*.log"))
	if err != nil || len(logs) == 0 {
		k.t.Errorf("find the relay's logs: %v", err)
	}
	for _, log := range logs {
		k.readLog(log)
	}
	if !k.t.Failed() {
		return
	}
	k.t.Logf("WALPOST_SEED=%d", k.seed)
	for _, log := range logs[max(0, len(logs)-3):] {
		b, _ := os.ReadFile(log)
		k.t.Logf("%s:\n%s", filepath.Base(log), end(string(b)))
	}
}

func (k *keeper) readLog(name string) {
	f, err := os.Open(name)
	if err != nil {
		k.t.Error(err)
		return
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var said struct{ Alarm string }
		_ = json.Unmarshal(lines.Bytes(), &said)
		if said.Alarm != "" && said.Alarm != k.expected || isFault(lines.Text()) {
			k.t.Errorf("%s says: %s", filepath.Base(name), lines.Text())
		}
	}
	if err := lines.Err(); err != nil {
		k.t.Error(err)
	}
}

func isFault(line string) bool {
	for _, fault := range []string{"DATA RACE", "panic: ", "fatal error: "} {
		if strings.Contains(line, fault) {
			return true
		}
	}
	return false
}

// end is the last part of a log.
func end(s string) string {
	const most = 4 << 10
	if len(s) <= most {
		return s
	}
	return "..." + s[len(s)-most:]
}
