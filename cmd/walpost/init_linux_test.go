package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/walpost/walpost/internal/testenv"
)

// TestInitAsks: on a terminal it asks for the servers, and before it changes anything. Every answer but yes is no.
func TestInitAsks(t *testing.T) {
	pg, nats := testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{})
	url, err := pg.CreateDB(t.Context(), "shop")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_HTTP_LISTEN", "") // the default port may be in use here
	run := func(answers string) (string, error) {
		master, terminal := pty(t, 200)
		if _, err := master.WriteString(answers); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		root := newRootCommand()
		root.SetArgs([]string{"init"})
		root.SetIn(terminal)
		root.SetOut(&out)
		root.SetErr(io.Discard)
		err := root.ExecuteContext(context.Background())
		return out.String(), errors.Join(err, terminal.Close())
	}
	for _, answer := range []string{"\n", "n\n", "yes please\n", "\x04"} {
		out, err := run(url + "\n\n" + nats.URL() + "\n\n" + answer)
		if err == nil || !strings.Contains(err.Error(), "nothing was changed") || !strings.Contains(out, "Do 7 steps? [y/N] ") {
			t.Fatalf("answered %q, it ended with %v:\n%s", answer, err, out)
		}
	}
	if left, _ := filepath.Glob("*"); len(left) > 0 {
		t.Errorf("%q was written", left)
	}
	if _, err := run("\n"); err == nil || !strings.Contains(err.Error(), "init needs a superuser's URL") {
		t.Errorf("without a URL it ended with %v", err)
	}
	if _, err := run(url + "\n\n" + nats.URL() + "\nnobody\n"); err == nil || !strings.Contains(err.Error(), `role "nobody" of the application`) {
		t.Errorf("with an application without a role it ended with %v", err)
	}
	if err := pg.Exec(t.Context(), "shop", `CREATE ROLE "my app"`); err != nil {
		t.Fatal(err)
	}
	if out, err := run(url + "\n\n" + nats.URL() + "\nmy app\ny\n"); err != nil || !strings.Contains(out, "\nNext: walpost run") || strings.Contains(out, "--app ROLE") {
		t.Fatalf("it ended with %v:\n%s", err, out)
	}
	err = pg.Exec(t.Context(), "shop", `SET ROLE "my app"; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', '1', 'order.placed', '{}')`)
	if err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile("walpost.yaml")
	if err != nil || !strings.Contains(string(text), "url: "+nats.URL()) {
		t.Errorf("it wrote %s, %v", text, err)
	}
}

// TestInitHidesThePassword: it asks for a password that the URL does not have, and the terminal does not show it. A
// signal amid the question has the terminal show again what is typed.
func TestInitHidesThePassword(t *testing.T) {
	pg, nats := testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{})
	if _, err := pg.CreateDB(t.Context(), "shop"); err != nil {
		t.Fatal(err)
	}
	const password = "s3 cret&+%/@"
	for _, sql := range []string{
		"CREATE ROLE boss LOGIN SUPERUSER PASSWORD '" + password + "'",
		`COPY (SELECT) TO PROGRAM 'cat > /dev/null; sed -i "1i host all boss all scram-sha-256" pg_hba.conf'`,
	} {
		if err := pg.Exec(t.Context(), "postgres", sql); err != nil {
			t.Fatal(err)
		}
	}
	if err := pg.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_HTTP_LISTEN", "")

	talk := func(ctx context.Context, after func(shows func(bool), answer func(question, text string))) (string, error) {
		master, terminal := pty(t, 200)
		ended := make(chan error, 1)
		go func() {
			root := newRootCommand()
			root.SetArgs([]string{"init", "--nats-url", nats.URL()})
			root.SetIn(terminal)
			root.SetOut(terminal)
			root.SetErr(io.Discard)
			ended <- errors.Join(root.ExecuteContext(ctx), terminal.Close())
		}()
		var seen strings.Builder
		buffer := make([]byte, 4096)
		answer := func(question, text string) {
			for !strings.HasSuffix(seen.String(), question) {
				n, err := master.Read(buffer)
				if seen.Write(buffer[:n]); err != nil {
					t.Fatalf("it never asked %q: %v\n%s", question, err, seen.String())
				}
			}
			if _, err := master.WriteString(text); err != nil {
				t.Fatal(err)
			}
		}
		shows := func(want bool) {
			for echo := !want; echo != want; time.Sleep(time.Millisecond) {
				state, err := unix.IoctlGetTermios(int(master.Fd()), unix.TCGETS)
				if err != nil {
					t.Fatal(err)
				}
				echo = state.Lflag&unix.ECHO != 0
			}
		}
		answer("/database): ", pg.URLFor("boss", "shop")+"\n")
		answer("Password of boss (not shown; empty: none): ", "")
		shows(false)
		after(shows, answer)
		_, _ = io.Copy(&seen, master) // EIO is its end
		return seen.String(), <-ended
	}

	seen, err := talk(t.Context(), func(_ func(bool), answer func(string, string)) {
		answer("none): ", password+"\n")
		answer("none yet): ", "\n")
		answer("[y/N] ", "n\n")
	})
	if err == nil || err.Error() != "nothing was changed" || !strings.Contains(seen, "as boss, a superuser") ||
		strings.Contains(seen, "cret") {
		t.Errorf("it ended with %v:\n%s", err, seen)
	}
	ctx, signal := context.WithCancel(t.Context())
	defer signal()
	seen, err = talk(ctx, func(shows func(bool), answer func(string, string)) {
		signal()
		shows(true)
		answer("none): ", "\n")
		answer("none yet): ", "\n")
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("after a signal it ended with %v:\n%s", err, seen)
	}
}

// TestInitOfAnotherUser: a package's file that the user may not look at is no obstacle. init writes walpost.yaml here.
func TestInitOfAnotherUser(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etc")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	setVar(t, &systemConfigFile, filepath.Join(dir, "walpost.yaml"))
	if err := os.WriteFile(systemConfigFile, []byte("log:\n  level: warn\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, k := range defaultConfig().keys() { // they would have it read no package's file
		if _, ok := k.variable(os.LookupEnv); ok {
			t.Setenv(k.env, "")
		}
	}
	t.Chdir(t.TempDir())
	load := func() (string, error) {
		cmd := newInitCommand()
		if err := cmd.ParseFlags([]string{"--postgres-url", "postgres://boss@127.0.0.1/shop"}); err != nil {
			t.Fatal(err)
		}
		c, err := loadInit(t.Context(), cmd.Flags(), &initOptions{role: "walpost"}, talk{})
		if err != nil {
			return "", err
		}
		return c.path, nil
	}
	if path, err := load(); path != systemConfigFile {
		t.Fatalf("its own user's init takes %q, %v", path, err)
	}
	restore := func() error { return os.Chmod(dir, 0o700) }
	if os.Geteuid() == 0 { // for files this thread is another user's: root is no exception
		runtime.LockOSThread()
		restore = func() error { return unix.Setfsuid(0) }
		if err := unix.Setfsuid(12345); err != nil {
			t.Fatal(err)
		}
	} else if err := os.Chmod(dir, 0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := restore(); err != nil {
			t.Error(err)
		}
	}()
	if path, err := load(); path != defaultConfigFile {
		t.Errorf("another user's init takes %q, %v", path, err)
	}
}
