package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// release is what git says of the commit, and where files are.
type release struct {
	root, out, work string
	tag, version    string // v1.2.3, 1.2.3
	revision        string // 12 digits, and -dirty where the checkout has changes
	commit          string // all digits
	at              time.Time
	platforms       []platform
	imageDigest     string // of the image, once it is built
}

func newRelease(ctx context.Context, out string, platforms []platform) (*release, error) {
	root, err := filepath.Abs(".")
	if err != nil {
		return nil, err
	}
	if out, err = filepath.Abs(out); err != nil {
		return nil, err
	}
	r := &release{root: root, out: out, platforms: platforms}
	if err := r.askGit(ctx); err != nil {
		return nil, err
	}
	if out == root || strings.HasPrefix(root, out+string(filepath.Separator)) {
		return nil, fmt.Errorf("-out: %s has the checkout in it", out)
	}
	if err := os.RemoveAll(out); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return nil, err
	}
	r.work, err = os.MkdirTemp("", "walpost-release-")
	return r, err
}

// askGit reads the commit. Without a tag the version is one before all releases.
func (r *release) askGit(ctx context.Context) error {
	git := func(args ...string) string {
		out, err := r.command(ctx, nil, "git", args...)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	r.commit = git("rev-parse", "HEAD")
	seconds, err := strconv.ParseInt(git("log", "-1", "--format=%ct"), 10, 64)
	if err != nil || r.commit == "" {
		return fmt.Errorf("read the commit: %s is no checkout that git trusts", r.root)
	}
	r.at = time.Unix(seconds, 0).UTC()
	r.revision = git("describe", "--always", "--exclude", "*", "--abbrev=12", "--dirty")
	if strings.HasSuffix(r.revision, "-dirty") {
		fmt.Fprintln(os.Stderr, "release: the checkout has changes: this is no release")
	}
	r.tag = git("describe", "--tags", "--match", "v*", "--dirty")
	if r.tag == "" {
		r.tag = "v0.0.0-dev." + r.at.Format("20060102150405") + ".g" + r.revision
	}
	r.version = strings.TrimPrefix(r.tag, "v")
	return nil
}

// command runs a program at the root of the checkout. An error has what it wrote to standard error.
func (r *release) command(ctx context.Context, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = r.root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	epoch := "SOURCE_DATE_EPOCH=" + strconv.FormatInt(r.at.Unix(), 10)
	cmd.Env = append(append(os.Environ(), epoch, "TZ=UTC", "LC_ALL=C"), env...)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.Bytes())
	}
	return out, nil
}

// programs compiles walpost for every platform. Nothing in it depends on the directory, the user or the time.
func (r *release) programs(ctx context.Context) error {
	for _, p := range r.platforms {
		if err := r.compile(ctx, p, r.programFile(p)); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) programFile(p platform) string {
	return filepath.Join(r.work, p.String(), p.program())
}

func (r *release) compile(ctx context.Context, p platform, file string) error {
	flags := fmt.Sprintf("-s -w -X main.version=%s -X main.revision=%s -X main.commitTime=%s",
		r.tag, r.revision, r.at.Format(time.RFC3339))
	_, err := r.command(ctx, []string{
		"CGO_ENABLED=0", "GOOS=" + p.os, "GOARCH=" + p.arch,
		"GOFLAGS=", "GOEXPERIMENT=", "GOAMD64=v1", "GOARM64=v8.0",
	}, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", file, "./cmd/walpost")
	return err
}

// manuals has a program for this machine write the manual pages, the completions and the documents.
func (r *release) manuals(ctx context.Context) error {
	here := filepath.Join(r.work, "here", "walpost")
	if err := r.compile(ctx, platform{runtime.GOOS, runtime.GOARCH}, here); err != nil {
		return err
	}
	if _, err := r.command(ctx, nil, here, "man", filepath.Join(r.work, "man")); err != nil {
		return err
	}
	for shell, name := range completions {
		script, err := r.command(ctx, nil, here, "completion", shell)
		if err != nil {
			return err
		}
		if err := writeFile(filepath.Join(r.work, "completions", name), script); err != nil {
			return err
		}
	}
	_, err := r.command(ctx, nil, here, "docs", "--out", filepath.Join(r.work, "docs"))
	return err
}

// completions are the names of the files by shell.
var completions = map[string]string{
	"bash": "walpost.bash", "zsh": "_walpost", "fish": "walpost.fish", "powershell": "walpost.ps1",
}

func writeFile(file string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o644)
}
