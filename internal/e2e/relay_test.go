package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/walpost/walpost/internal/testenv"
)

// process is a relay at work.
type process struct {
	*rig
	life *testenv.Program
	log  string
}

// start starts the relay. At the test's end it is killed where it still runs, and
// its log is looked through for alarms.
func (r *rig) start() *process {
	r.t.Helper()
	p := &process{rig: r, log: filepath.Join(r.t.ArtifactDir(), "relay.log")}
	var err error
	p.life, err = testenv.StartProgram(r.command("run", "--log-format", "json"), p.log)
	r.must(err)
	r.t.Cleanup(func() {
		r.must(p.life.Kill())
		p.readLog()
	})
	return p
}

// stop asks the relay to end, which it does in peace, unless it has ended before.
func (p *process) stop() {
	p.t.Helper()
	select {
	case <-p.life.Done():
		p.t.Error("the relay has ended by itself")
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	if err := p.life.Stop(ctx); err != nil {
		p.t.Errorf("stop the relay: %v", err)
	}
	if err := p.life.Err(); err != nil {
		p.t.Errorf("the relay has ended: %v", err)
	}
}

// readLog looks for what a relay may not say while all is well.
func (p *process) readLog() {
	text, err := os.ReadFile(p.log)
	p.must(err)
	lines := bufio.NewScanner(strings.NewReader(string(text)))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var said struct{ Alarm string }
		_ = json.Unmarshal(lines.Bytes(), &said)
		if said.Alarm != "" || isFault(lines.Text()) {
			p.t.Errorf("the relay says: %s", lines.Text())
		}
	}
	p.must(lines.Err())
	if p.t.Failed() {
		p.t.Logf("WALPOST_SEED=%d, the relay's log ends:\n%s", p.seed, text[max(0, len(text)-4<<10):])
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
