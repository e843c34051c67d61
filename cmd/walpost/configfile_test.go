package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
)

// TestConfigFile: the named file goes before the one here, and that before a package's, which is not read beside variables.
func TestConfigFile(t *testing.T) {
	dir, system := t.TempDir(), systemConfigFile
	t.Cleanup(func() { systemConfigFile = system })
	systemConfigFile = filepath.Join(dir, "etc", "walpost.yaml")
	t.Chdir(dir)
	write := func(path, slot string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("postgres: {slot: "+slot+"}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	reads := func(slot, source string, args ...string) {
		t.Helper()
		cmd := &cobra.Command{}
		addConfigFlags(cmd)
		if err := cmd.ParseFlags(args); err != nil {
			t.Fatal(err)
		}
		l, err := load(cmd.Flags())
		if err != nil || l.cfg.Postgres.Slot != slot || !strings.HasPrefix(l.source(), source) {
			t.Errorf("%q: %v, slot %q from %q, want %q from %q", args, err, l.cfg.Postgres.Slot, l.source(), slot, source)
		}
	}
	warns := func(want bool) {
		t.Helper()
		cmd := &cobra.Command{}
		addConfigFlags(cmd)
		var said strings.Builder
		cmd.SetErr(&said)
		_, err := loadConfig(cmd)
		if got := strings.HasPrefix(said.String(), "warning: nothing is configured, and the defaults are used: "); got != want || err != nil {
			t.Errorf("%v, it said %q", err, said.String())
		}
	}
	reads("walpost", "no file: ")
	warns(true)
	write(systemConfigFile, "package")
	reads("package", "file: "+systemConfigFile)
	reads("flag", "file: "+systemConfigFile, "--slot", "flag")
	t.Setenv("WALPOST_SLOT", "variable")
	reads("variable", "no file: walpost.yaml does not exist here, and "+systemConfigFile+" is not read because WALPOST_SLOT is set")
	warns(false)
	t.Setenv("WALPOST_SLOT", "")
	write("walpost.yaml", "here")
	reads("here", "file: walpost.yaml")
	reads("package", "file: "+systemConfigFile, "--config", systemConfigFile)
	err := unreadable(&fs.PathError{Op: "open", Path: systemConfigFile, Err: fs.ErrPermission})
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(hint.Of(err), asUser("walpost", "walpost ...")) {
		t.Errorf("%v (%s)", err, hint.Of(err))
	}
}

func TestAsUser(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if got := asUser("relay", "walpost init"); got != "sudo -u relay walpost init" {
		t.Errorf("without runuser it is %q", got)
	}
	if err := os.WriteFile(filepath.Join(dir, "runuser"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := asUser("relay", "walpost init"); got != "runuser -u relay -- walpost init" {
		t.Errorf("with runuser it is %q", got)
	}
}
