package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
		out, err := run(url + "\n" + nats.URL() + "\n\n" + answer)
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
	if _, err := run(url + "\n" + nats.URL() + "\nnobody\n"); err == nil || !strings.Contains(err.Error(), `role "nobody" of the application`) {
		t.Errorf("with an application without a role it ended with %v", err)
	}
	if err := pg.Exec(t.Context(), "shop", `CREATE ROLE "my app"`); err != nil {
		t.Fatal(err)
	}
	if out, err := run(url + "\n" + nats.URL() + "\nmy app\ny\n"); err != nil || !strings.Contains(out, "\nNext: walpost run") || strings.Contains(out, "--app ROLE") {
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
