package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// reachable returns dir, or a copy of the installation that the account can
// execute: a checkout below a private home directory is closed to it.
func (w *workspace) reachable(ctx context.Context, dir string, who *account) (string, error) {
	if who == nil {
		return dir, nil
	}
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version")
	cmd.Dir = "/"
	who.apply(cmd)
	err := cmd.Run()
	if err == nil || !errors.Is(err, os.ErrPermission) {
		return dir, nil // another error will show itself, with its log, at the start
	}
	w.mu.Lock()
	bin := w.binaries[dir]
	w.mu.Unlock()
	if bin != "" {
		return bin, nil
	}
	home, err := w.mkdir("install")
	if err != nil {
		return "", err
	}
	home = filepath.Join(home, "postgres")
	if err := copyTree(home, filepath.Dir(dir), who, nil); err != nil {
		return "", fmt.Errorf("copy PostgreSQL to where its user can run it: %w", err)
	}
	bin = filepath.Join(home, filepath.Base(dir))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.binaries[dir] = bin
	return bin, nil
}
