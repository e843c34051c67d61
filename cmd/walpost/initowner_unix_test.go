//go:build unix

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// TestInitAsRoot: root writes no file that the relay's user could not read, and changes nothing then.
func TestInitAsRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it is about root")
	}
	pg, nats := testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{})
	url, err := pg.CreateDB(t.Context(), "shop")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config, password := filepath.Join(dir, "walpost.yaml"), filepath.Join(dir, "walpost.password")
	setVar(t, &systemConfigFile, config)
	t.Setenv("WALPOST_HTTP_LISTEN", "")
	own := func(file string, uid, gid int) {
		t.Helper()
		if err := os.Lchown(file, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) error {
		_, err := initHere(append(args, "--config", config, "--yes", "--postgres-url", url, "--nats-url", nats.URL())...)
		return err
	}
	refuses := func(file, user string, args ...string) {
		t.Helper()
		want := file + " would belong to root, and the relay's user " + user + " could not read it"
		err := run(args...)
		if err == nil || err.Error() != want || !strings.Contains(hint.Of(err), asUser(user, "walpost init")) {
			t.Errorf("it ended with %v, hint %q, want %q", err, hint.Of(err), want)
		}
	}
	takes := func(args ...string) {
		t.Helper()
		if err := run(args...); err != nil {
			t.Errorf("it ended with %v", err)
		}
	}
	const other = 1 // a user and a group that every Unix has
	otherName := userName(other)

	own(dir, 0, other) // as in a package
	takes("--print")
	refuses(password, packageUser)
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("%q was written", left)
	}
	own(dir, 0, 0)
	takes()
	own(config, other, other)
	own(password, other, other)
	refuses(password, otherName, "--new-password")
	refuses(config, otherName, "--force", "--slot", "another")
	takes() // nothing is to be written

	own(config, 0, 0)
	own(password, 0, 0)
	own(dir, 0, other)
	refuses(password, packageUser, "--new-password")
	takes()
	setVar(t, &systemConfigFile, "/nonexistent/walpost.yaml")
	takes("--new-password")
}
