// Command release builds what a release has: programs, archives, packages, an image, the chart, a Homebrew
// formula, lists of components, provenance and checksums. The same commit and the same Go give the same
// bytes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	out := flag.String("out", "dist", "the directory to write to; what is in it is deleted")
	only := flag.String("platforms", allPlatforms, "the platforms, separated by commas")
	key := flag.String("sign-key", os.Getenv("WALPOST_SIGN_KEY"), "an SSH key that signs the checksums")
	twice := flag.Bool("check", false, "build twice, in clones in two directories, and compare all bytes")
	cold := flag.Bool("cold", false, "with -check: compile everything twice, too")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("release takes no argument, got %q", flag.Arg(0))
	}
	platforms, err := parsePlatforms(*only)
	if err != nil {
		return err
	}
	if *twice {
		return check(ctx, *out, *only, *cold)
	}
	r, err := newRelease(ctx, *out, platforms)
	if err != nil {
		return err
	}
	err = r.make(ctx, *key)
	return errors.Join(err, os.RemoveAll(r.work))
}

const allPlatforms = "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64,windows/amd64,windows/arm64"

type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "_" + p.arch }

// program is the name of the program's file.
func (p platform) program() string {
	if p.os == "windows" {
		return "walpost.exe"
	}
	return "walpost"
}

func parsePlatforms(list string) (all []platform, err error) {
	for name := range strings.SplitSeq(list, ",") {
		if !strings.Contains(","+allPlatforms+",", ","+name+",") {
			return nil, fmt.Errorf("-platforms: %q is none of %s", name, allPlatforms)
		}
		system, arch, _ := strings.Cut(name, "/")
		all = append(all, platform{system, arch})
	}
	return all, nil
}

// make goes through the steps. Each may use the files of those before it.
func (r *release) make(ctx context.Context, key string) error {
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"programs", r.programs},
		{"manuals", r.manuals},
		{"archives", r.archives},
		{"packages", r.packages},
		{"components", r.components},
		{"image", r.image},
		{"chart", r.chart},
		{"formula", r.formula},
		{"provenance", r.provenance},
		{"checksums", r.checksums},
	}
	for _, s := range steps {
		fmt.Fprintf(os.Stderr, "release: %s\n", s.name)
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("make %s: %w", s.name, err)
		}
	}
	return r.sign(ctx, key)
}

// path is a file of the release.
func (r *release) path(name string) string { return filepath.Join(r.out, name) }
