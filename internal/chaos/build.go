package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// programs are those that were built, by mutant.
var programs = struct {
	sync.Mutex
	of map[*mutant]string
}{of: map[*mutant]string{}}

func relayProgram(ctx context.Context, m *mutant) (program string, err error) {
	programs.Lock()
	defer programs.Unlock()
	if program = programs.of[m]; program == "" {
		program, err = buildRelay(ctx, m)
		programs.of[m] = program
	}
	return program, err
}

// buildRelay builds the program as it is, except that its wall clock can be set, and
// that a defect is planted in it where one is asked for.
func buildRelay(ctx context.Context, m *mutant) (string, error) {
	files, err := shiftable(ctx)
	if err != nil {
		return "", err
	}
	if m != nil {
		if err := testenv.Plant(ctx, files, m.edits...); err != nil {
			return "", fmt.Errorf("mutant %q: %w", m.name, err)
		}
	}
	return testenv.BuildPatched(ctx, "github.com/walpost/walpost/cmd/walpost", files)
}

// clockFile names the file that a relay's wall clock is shifted by: in nanoseconds.
const clockFile = "WALPOST_CHAOS_CLOCK"

// shiftable patches the standard library: the relay and all its packages read a wall
// clock that is off by what a file says, while the monotonic clock and all timers go
// on, as when an operator sets the machine's clock.
func shiftable(ctx context.Context) (map[string]string, error) {
	root, err := testenv.GoTool(ctx, "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	module, err := testenv.GoTool(ctx, "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return nil, err
	}
	name := filepath.Join(root, "src", "time", "time.go")
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	const read = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	patched, err := testenv.ReplaceOnce(string(text), read, read+"\tsec, nsec = shifted(sec, nsec)\n")
	if err != nil {
		return nil, fmt.Errorf("patch %s, which another Go has written differently: %w", name, err)
	}
	return map[string]string{
		name: patched,
		filepath.Join(filepath.Dir(name), "zz_shift.go"):            shiftSource,
		filepath.Join(module, "cmd", "walpost", "zz_chaosshift.go"): setterSource,
	}, nil
}

const shiftSource = `package time

import "sync/atomic"

var wallShift atomic.Int64

func SetWallShift(by int64) { wallShift.Store(by) }

func shifted(sec int64, nsec int32) (int64, int32) {
	by := wallShift.Load()
	if by == 0 {
		return sec, nsec
	}
	at := sec*1e9 + int64(nsec) + by
	return at / 1e9, int32(at % 1e9)
}
`

const setterSource = `package main

import (
	"os"
	"strconv"
	"time"
)

func init() {
	name := os.Getenv("` + clockFile + `")
	if name == "" {
		return
	}
	set := func() {
		text, _ := os.ReadFile(name)
		if by, err := strconv.ParseInt(string(text), 10, 64); err == nil {
			time.SetWallShift(by)
		}
	}
	set()
	go func() {
		for range time.Tick(20 * time.Millisecond) {
			set()
		}
	}()
}
`

// setClock sets the relay's wall clock off by so much.
func (r *relay) setClock(by time.Duration) error {
	return replaceFile(r.clock, fmt.Sprint(by.Nanoseconds()))
}

// replaceFile writes a file that nobody sees half written.
func replaceFile(name, text string) error {
	if err := os.WriteFile(name+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}
