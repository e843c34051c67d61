package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/walpost/walpost/internal/testenv"
)

// TestInitScripts gives each script a cluster, because roles belong to the whole of it, with an empty database in
// ADMIN_URL, and the command restart. That of the script replica has wal_level = replica. Each has its NATS server, for
// its streams. Beside it there is one without JetStream, and one that asks for user and password.
func TestInitScripts(t *testing.T) {
	auth := testenv.NewNATS(t, testenv.NATSOptions{Config: `authorization { user: relay, password: s3cret }`})
	plain := testenv.NewNATS(t, testenv.NATSOptions{JetStream: "enabled: false"})
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/init",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			var opts testenv.PGOptions
			if filepath.Base(env.WorkDir) == "script-replica" {
				opts.Settings = map[string]string{"wal_level": "replica"}
			}
			pg, err := testenv.StartPostgres(context.Background(), opts)
			if err != nil {
				return err
			}
			env.Values["pg"] = pg
			env.Defer(func() { _ = pg.Close() })
			nats, err := testenv.StartNATS(context.Background(), testenv.NATSOptions{})
			if err != nil {
				return err
			}
			env.Defer(func() { _ = nats.Close() })
			free := reserve(t)
			env.Setenv("WALPOST_HTTP_LISTEN", free.Addr().String())
			env.Setenv("WALPOST_NATS_URL", nats.URL())
			env.Setenv("SECRET_NATS", strings.Replace(nats.URL(), "//", "//relay:s3cret@", 1))
			env.Setenv("NATS_AUTH", auth.URL())
			env.Setenv("NATS_PLAIN", plain.URL())
			url, err := pg.CreateDB(context.Background(), "shop")
			env.Setenv("ADMIN_URL", url)
			env.Setenv("SECOND_URL", pg.URL("second"))
			env.Setenv("RELAY_URL", pg.URLFor("walpost", "shop"))
			return errors.Join(err, free.Close())
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"until": until,
			"restart": func(ts *testscript.TestScript, _ bool, _ []string) {
				ts.Check(ts.Value("pg").(*testenv.Postgres).Restart(context.Background()))
			},
			"sql": func(ts *testscript.TestScript, _ bool, args []string) {
				_, err := ts.Stdout().Write([]byte(querySQL(ts, args[0])))
				ts.Check(err)
			},
			"mode": func(ts *testscript.TestScript, _ bool, args []string) {
				for _, name := range args[1:] {
					info, err := os.Stat(ts.MkAbs(name))
					ts.Check(err)
					if got := fmt.Sprintf("%o", info.Mode().Perm()); got != args[0] {
						ts.Fatalf("%s has mode %s", name, got)
					}
				}
			},
		},
	})
}

// TestInitOfAPackage: where a package has its unit, init ends with the command that starts it, and so does its script.
func TestInitOfAPackage(t *testing.T) {
	pg, nats := testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{})
	url, err := pg.CreateDB(t.Context(), "shop")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	setVar(t, &systemConfigFile, filepath.Join(dir, "walpost.yaml"))
	setVar(t, &systemUnits, dir)
	t.Setenv("WALPOST_HTTP_LISTEN", "")
	ends := func(want string, args ...string) {
		t.Helper()
		out, err := initHere(append(args, "--yes", "--postgres-url", url, "--nats-url", nats.URL())...)
		if err != nil || !strings.HasSuffix(out, want+"\n") {
			t.Errorf("it ended with %v, want %q:\n%s", err, want, out)
		}
	}
	second, third := filepath.Join(dir, "shop_2.yaml"), filepath.Join(dir, "shop 3.yaml")
	fourth := filepath.Join(t.TempDir(), "walpost.yaml")
	ends("Next: walpost run", "--config", systemConfigFile)
	ends("Next: walpost run --config "+second, "--config", second, "--role", "second", "--slot", "second")
	for _, unit := range []string{"walpost.service", "walpost@.service"} {
		if err := os.WriteFile(filepath.Join(dir, unit), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ends("Next: systemctl enable --now walpost@shop_2", "--config", second)
	ends("Next: walpost run --config "+third, "--config", third, "--role", "third", "--slot", "third")
	ends("Next: walpost run --config "+fourth, "--config", fourth, "--role", "fourth", "--slot", "fourth")
	ends("Next: systemctl enable --now walpost", "--config", systemConfigFile)
	t.Chdir(dir)
	ends("Next: systemctl enable --now walpost")
	ends("-- And:  systemctl enable --now walpost", "--print")
}

// initHere runs init in this process, on no terminal.
func initHere(args ...string) (string, error) {
	var out strings.Builder
	root := newRootCommand()
	root.SetArgs(append([]string{"init"}, args...))
	root.SetIn(strings.NewReader(""))
	root.SetOut(&out)
	root.SetErr(io.Discard)
	err := root.ExecuteContext(context.Background())
	return out.String(), err
}

func setVar(t *testing.T, variable *string, value string) {
	old := *variable
	t.Cleanup(func() { *variable = old })
	*variable = value
}

// TestInitIsKilled: killed after any step, it completes the set-up when it is run again.
func TestInitIsKilled(t *testing.T) {
	pg, nats := testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{})
	path, err := testenv.Build(t.Context(), "github.com/walpost/walpost/cmd/walpost", "-tags=crashpoints")
	if err != nil {
		t.Fatal(err)
	}
	if err := pg.Exec(t.Context(), "postgres", `CREATE ROLE app`); err != nil {
		t.Fatal(err)
	}
	for n, killed := 1, true; killed; n++ {
		name := fmt.Sprintf("killed%d", n)
		url, err := pg.CreateDB(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		run := func(crash string, args ...string) (string, error) {
			cmd := exec.CommandContext(t.Context(), path, args...)
			cmd.Dir = dir
			cmd.Env = []string{
				"WALPOST_CRASH=" + crash, "WALPOST_SLOT=" + name, "WALPOST_STREAM=" + name,
				"WALPOST_SUBJECT=" + name + ".{event_type}", "WALPOST_NATS_URL=" + nats.URL(), "HOME=" + dir,
				"WALPOST_HTTP_LISTEN=",
			}
			out, err := cmd.CombinedOutput()
			return string(out), err
		}
		setup := []string{"init", "--yes", "--postgres-url", url, "--role", name + " relay", "--owner", name + " owner", "--app", "app"}
		out, err := run(fmt.Sprintf("setup:%d", n), setup...)
		var exit *exec.ExitError
		killed = errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
		if !killed && err != nil {
			t.Fatalf("it ended with %v:\n%s", err, out)
		}
		if out, err := run("", setup...); err != nil || !strings.Contains(out, "Next: walpost run") {
			t.Fatalf("killed after step %d, it ended with %v:\n%s", n, err, out)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, ".walpost-*")); len(left) > 0 {
			t.Errorf("%q is left", left)
		}
		err = pg.Exec(t.Context(), name, `SET ROLE app; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', '1', 'order.placed', '{}')`)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := run("", "run", "--once"); err != nil || !strings.Contains(out, `"delivered":1,`) {
			t.Fatalf("killed after step %d, the relay ended with %v:\n%s", n, err, out)
		}
		if !killed && n < 8 {
			t.Errorf("it was killed after %d steps only", n-1)
		}
	}
}
