package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Program is a program under test, running as a process of its own: it can be
// killed like by a crash, and does not outlive this process.
type Program struct{ proc *process }

// StartProgram starts cmd with its output appended to logFile.
func StartProgram(cmd *exec.Cmd, logFile string) (*Program, error) {
	proc, err := startProcess(cmd, logFile, syscall.SIGKILL)
	if err != nil {
		return nil, err
	}
	return &Program{proc}, nil
}

// Done is closed when the program has ended.
func (p *Program) Done() <-chan struct{} { return p.proc.done }

// Err is nil where the program has ended with status 0. It is to be asked after
// Done.
func (p *Program) Err() error { return p.proc.err }

// Peak is the greatest resident memory so far, in bytes; 0 where the program has ended or the system does not
// tell.
func (p *Program) Peak() int64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.proc.cmd.Process.Pid))
	_, after, _ := strings.Cut(string(status), "\nVmHWM:")
	var kib int64
	_, _ = fmt.Sscanf(after, "%d kB", &kib)
	return kib << 10
}

// Signal sends a signal, and does nothing where the program has ended.
func (p *Program) Signal(sig syscall.Signal) error {
	if err := p.proc.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Kill ends the program by SIGKILL and waits for its end.
func (p *Program) Kill() error { return p.proc.stop(context.Background(), syscall.SIGKILL) }

// Stop asks the program to end by SIGTERM and waits for it. When ctx is done
// first the program is left to finish what it is doing.
func (p *Program) Stop(ctx context.Context) error { return p.proc.stop(ctx, syscall.SIGTERM) }

// building lets one build run at a time.
var building sync.Mutex

// Build builds a main package with the go command, once per process and flags,
// and returns the program's path. A test runs inside the module, where the go
// command finds its packages and the versions of go.mod.
func Build(ctx context.Context, pkg string, flags ...string) (string, error) {
	building.Lock()
	defer building.Unlock()
	key := strings.Join(append(flags, pkg), " ")
	space.mu.Lock()
	built := space.binaries[key]
	space.mu.Unlock()
	if built != "" {
		return built, nil
	}
	built, err := build(ctx, pkg, flags...)
	if err != nil {
		return "", err
	}
	space.mu.Lock()
	defer space.mu.Unlock()
	space.binaries[key] = built
	return built, nil
}

// BuildPatched is Build with source files that are replaced, or added, by others:
// texts by their paths. Every call builds.
func BuildPatched(ctx context.Context, pkg string, files map[string]string) (string, error) {
	dir, err := space.mkdir("patch")
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for name, text := range files {
		replace[name] = filepath.Join(dir, fmt.Sprintf("%d.go", len(replace)))
		if err := os.WriteFile(replace[name], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(name, overlay, 0o600); err != nil {
		return "", err
	}
	building.Lock()
	defer building.Unlock()
	return build(ctx, pkg, "-overlay", name)
}

// build is for the holder of building. It builds where the last process did, where that can be kept: the go
// command links nothing when nothing has changed.
func build(ctx context.Context, pkg string, flags ...string) (string, error) {
	dir, err := space.mkdir("bin")
	if err != nil {
		return "", err
	}
	built := filepath.Join(dir, programName(pkg))
	kept, err := keptPath("program", append(flags, pkg)...)
	if err != nil || slices.Contains(flags, "-overlay") {
		return built, goBuild(ctx, built, pkg, flags)
	}
	return built, alone(kept, func() error {
		if err := goBuild(ctx, kept, pkg, flags); err != nil {
			return err
		}
		// The next build replaces the kept one. This process must not write the copy: a child that is
		// forked meanwhile would have it open, and no process runs a file that is open for writing.
		if out, err := exec.CommandContext(ctx, "cp", kept, built).CombinedOutput(); err != nil {
			return fmt.Errorf("copy %s: %w\n%s", kept, err, out)
		}
		return nil
	})
}

func goBuild(ctx context.Context, built, pkg string, flags []string) error {
	// A checkout that git does not trust, because another user made it, has no
	// version control stamp.
	// It goes without the tables for a debugger, which take the linker half of its time.
	args := append([]string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", built}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	if !slices.Contains(flags, "-race") { // without C, as a release is built
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

var majorVersion = regexp.MustCompile(`^v[0-9]+$`)

// programName is what go install would call the package's program.
func programName(pkg string) string {
	if name := path.Base(pkg); !majorVersion.MatchString(name) {
		return name
	}
	return path.Base(path.Dir(pkg))
}
