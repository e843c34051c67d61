// Package pgbin finds PostgreSQL's server programs.
package pgbin

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

const (
	// EnvBin names the directory with the PostgreSQL programs to use.
	EnvBin = "WALPOST_PG_BIN"
	// EnvExtra names more of them, separated by colons, for tests that
	// run on several versions.
	EnvExtra = "WALPOST_PG_EXTRA_BINS"

	installHint = "install the PostgreSQL server (Debian, Ubuntu: apt-get install postgresql; " +
		"Fedora: dnf install postgresql-server; macOS: brew install postgresql), " +
		"or set " + EnvBin + " to the directory that holds initdb and postgres"
)

// Binaries is an installation of PostgreSQL's server programs.
type Binaries struct {
	// Dir holds initdb, pg_ctl and postgres.
	Dir string
	// Version is what postgres says of itself, such as "15.18".
	Version string
	Major   int
}

func (b Binaries) String() string { return fmt.Sprintf("PostgreSQL %s (%s)", b.Version, b.Dir) }

// Find looks in $WALPOST_PG_BIN, which must be right where it is set,
// then along PATH, then where distributions put PostgreSQL, newest first.
func Find() (Binaries, error) {
	if dir := os.Getenv(EnvBin); dir != "" {
		b, err := In(dir)
		if err != nil {
			return Binaries{}, hint.Errorf(installHint, "read %s: %w", EnvBin, err)
		}
		return b, nil
	}
	for _, dir := range append(binDirsOfPath(), binDirsOfSystem()...) {
		if b, err := In(dir); err == nil {
			return b, nil
		}
	}
	return Binaries{}, hint.Wrap(
		errors.New("find PostgreSQL: no directory with initdb, pg_ctl and postgres"), installHint)
}

// Extra reads $WALPOST_PG_EXTRA_BINS; without it there are none.
func Extra() ([]Binaries, error) {
	var found []Binaries
	for _, dir := range filepath.SplitList(os.Getenv(EnvExtra)) {
		if dir == "" {
			continue
		}
		b, err := In(dir)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", EnvExtra, err)
		}
		found = append(found, b)
	}
	return found, nil
}

// All is the default installation and, after it, the extra ones.
func All() ([]Binaries, error) {
	first, err := Find()
	if err != nil {
		return nil, err
	}
	extra, err := Extra()
	return append([]Binaries{first}, extra...), err
}

// binDirsOfPath follows symbolic links: a distribution may link single
// programs into a directory of PATH.
func binDirsOfPath() []string {
	var dirs []string
	for _, name := range []string{"postgres", "pg_ctl", "initdb"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	return dirs
}

func binDirsOfSystem() []string {
	var dirs []string
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		found, _ := filepath.Glob(pattern) // the only error is a bad pattern
		slices.SortFunc(found, func(a, b string) int { return majorOfPath(b) - majorOfPath(a) })
		dirs = append(dirs, found...)
	}
	return dirs
}

var digits = regexp.MustCompile(`[0-9]+`)

func majorOfPath(dir string) int {
	n, _ := strconv.Atoi(digits.FindString(dir))
	return n
}

var versionLine = regexp.MustCompile(`\(PostgreSQL\) (([0-9]+)\S*)`)

// In reads the installation in one directory.
func In(dir string) (Binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Binaries{}, err
	}
	for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return Binaries{}, err
		}
	}
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return Binaries{}, fmt.Errorf("run %s/postgres --version: %w", dir, err)
	}
	m := versionLine.FindStringSubmatch(string(out))
	if m == nil {
		return Binaries{}, fmt.Errorf("read version of %s/postgres: %q", dir, out)
	}
	major, err := strconv.Atoi(m[2])
	return Binaries{Dir: dir, Version: m[1], Major: major}, err
}
