package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// check builds the commit in two clones, in directories of different names, and compares what they have. The
// files of the second stay in out.
func check(ctx context.Context, out, platforms string, cold bool) (err error) {
	work, err := os.MkdirTemp("", "walpost-release-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	var built [2]map[string]string
	if out, err = filepath.Abs(out); err != nil {
		return err
	}
	for i, name := range []string{"a", "another/directory"} {
		if built[i], err = build(ctx, filepath.Join(work, name), out, platforms, cold); err != nil {
			return err
		}
	}
	return compare(os.Stdout.WriteString, built[0], built[1])
}

// build clones the checkout's commit and makes the release there. It returns the files' checksums.
func build(ctx context.Context, dir, out, platforms string, cold bool) (map[string]string, error) {
	run := func(env []string, name string, args ...string) error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		cmd.Env = append(os.Environ(), env...)
		return cmd.Run()
	}
	if err := run(nil, "git", "clone", "--quiet", "--no-hardlinks", ".", dir); err != nil {
		return nil, fmt.Errorf("clone the checkout: %w", err)
	}
	env := []string{"WALPOST_SIGN_KEY="}
	if cold {
		env = append(env, "GOCACHE="+dir+".cache")
	}
	args := []string{"-C", dir, "run", "./internal/release", "-out", out, "-platforms", platforms}
	if err := run(env, "go", args...); err != nil {
		return nil, fmt.Errorf("build in %s: %w", dir, err)
	}
	names, sums, err := (&release{out: out}).sums()
	files := map[string]string{}
	for i := range names {
		files[names[i]] = sums[i]
	}
	return files, err
}

// compare reports every file that is not the same in both.
func compare(report func(string) (int, error), a, b map[string]string) error {
	names := map[string]bool{}
	for name := range a {
		names[name] = true
	}
	for name := range b {
		names[name] = true
	}
	var differ []string
	for name := range names {
		if a[name] != b[name] {
			differ = append(differ, name)
		}
	}
	slices.Sort(differ)
	if len(differ) > 0 {
		return fmt.Errorf("two builds of one commit differ in %d of %d files: %v",
			len(differ), len(names), differ)
	}
	if len(names) == 0 {
		return errors.New("two builds of one commit have no files")
	}
	_, err := report(fmt.Sprintf("two builds of one commit: the same bytes in all %d files\n", len(names)))
	return err
}
