package main

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

// errNotInCommit means that the directory was not there yet.
var errNotInCommit = errors.New("the commit does not have the directory")

// gitTree is a directory as it was in a commit.
func gitTree(ctx context.Context, dir, ref string) (fs.FS, error) {
	const advice = "name a commit or a branch that this clone has; " +
		"in CI fetch it first (git fetch origin main)"
	if strings.HasPrefix(ref, "-") {
		return nil, &usageError{hint.Errorf(advice, "--against-ref: %q is no commit", ref)}
	}
	if _, err := git(ctx, dir, "rev-parse", "--git-dir"); err != nil {
		return nil, hint.Errorf("run it in a clone that Git can read, or compare with a directory: --against",
			"read %s at %s: %w", dir, ref, err)
	}
	commit, err := git(ctx, dir, "rev-parse", "--verify", "--quiet", ref+"^{commit}")
	if err != nil {
		return nil, hint.Errorf(advice, "read %s at %s: no such commit", dir, ref)
	}
	hash := strings.TrimSpace(string(commit))
	if names, err := git(ctx, dir, "ls-tree", "--name-only", hash, "./"); err != nil || len(names) == 0 {
		return nil, errNotInCommit
	}
	archive, err := git(ctx, dir, "archive", "--format=zip", hash, ".")
	if err != nil {
		return nil, fmt.Errorf("read %s at %s: %w", dir, ref, err)
	}
	return zip.NewReader(bytes.NewReader(archive), int64(len(archive)))
}

// git runs in the directory, which names it for all commands.
func git(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{"-C", dir}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if text := strings.TrimSpace(stderr.String()); err != nil && text != "" {
		return nil, errors.New(text)
	}
	if err != nil {
		return nil, fmt.Errorf("git %s: %w", args[0], err)
	}
	return out, nil
}
