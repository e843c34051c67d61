package testenv

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// janitorScript reads until the pipe from this process is closed, which the
// kernel does however the process ends: a panic, a test timeout or SIGKILL.
// The pid directory holds one empty file SIGNAL.PID for every running server.
const janitorScript = `
read -r _
for f in "$1"/pid/*; do
	[ -e "$f" ] || continue
	f=${f##*/}
	kill -"${f%.*}" "${f#*.}"
done
n=0
until rm -rf "$1" || [ $n -ge 100 ]; do
	n=$((n + 1))
	sleep 0.1
done
`

// workspace is the process's temporary directory and what runs in it.
type workspace struct {
	// mu guards the fields, not the files.
	mu       sync.Mutex
	dir      string
	janitor  *exec.Cmd
	pipe     io.Closer
	serial   int
	children map[*process]struct{}
	shared   *Postgres
	clusters map[string]*template
	binaries map[string]string
}

var space workspace

// Cleanup kills every server that is still running, waits for its end, and
// removes the temporary directory. What was started before is unusable
// afterwards; new servers may be started.
func Cleanup() error {
	space.mu.Lock()
	children := space.children
	dir, janitor, pipe := space.dir, space.janitor, space.pipe
	space.dir, space.janitor, space.pipe, space.children = "", nil, nil, nil
	space.shared, space.clusters, space.binaries = nil, nil, nil
	space.mu.Unlock()

	if dir == "" {
		return nil
	}
	for p := range children {
		p.kill()
	}
	err := removeAll(dir)
	return errors.Join(err, pipe.Close(), janitor.Wait())
}

// mkdir makes a new directory in the workspace, open to be traversed by the
// unprivileged user that the servers run as.
func (w *workspace) mkdir(prefix string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.open(); err != nil {
		return "", err
	}
	w.serial++
	dir := filepath.Join(w.dir, fmt.Sprintf("%s%d", prefix, w.serial))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("create directory: %w", err)
	}
	return dir, nil
}

// open makes the workspace on first use. w.mu is held.
func (w *workspace) open() error {
	if w.dir != "" {
		return nil
	}
	dir, err := os.MkdirTemp(tempRoot(), "walpost-")
	if err != nil {
		return fmt.Errorf("create workspace: %w", err)
	}
	if err := w.furnish(dir); err != nil {
		return errors.Join(fmt.Errorf("create workspace: %w", err), os.RemoveAll(dir))
	}
	w.dir = dir
	w.children = make(map[*process]struct{})
	w.clusters = make(map[string]*template)
	w.binaries = make(map[string]string)
	return nil
}

func (w *workspace) furnish(dir string) error {
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, "pid"), 0o700); err != nil {
		return err
	}
	janitor := exec.Command("/bin/sh", "-c", janitorScript, "sh", dir)
	janitor.Dir = "/"
	// A session of its own: ^C at a terminal, or a signal to the process
	// group, must not end it before its work is done.
	janitor.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	pipe, err := janitor.StdinPipe()
	if err != nil {
		return err
	}
	if err := janitor.Start(); err != nil {
		return err
	}
	w.janitor, w.pipe = janitor, pipe
	return nil
}

// tempRoot is the directory for the workspace: the system's, unless the
// servers run as another user who cannot get there.
func tempRoot() string {
	dir := os.TempDir()
	if os.Geteuid() == 0 && !openToAll(dir) {
		return "/tmp"
	}
	return dir
}

// openToAll reports whether every user may traverse dir.
func openToAll(dir string) bool {
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}

// removeAll removes dir although processes that are just ending may still
// write to it.
func removeAll(dir string) error {
	var err error
	for range 50 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("remove directory: %w", err)
}
