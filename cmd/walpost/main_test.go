package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) {
	systemConfigFile = "/nonexistent/walpost.yaml" // this machine may have the package
	testscript.Main(tests{m}, map[string]func(){"walpost": main})
}

// tests ends the servers and looks for leaked goroutines, as testenv.Main does, but leaves the exit to testscript.
type tests struct{ m *testing.M }

func (t tests) Run() int {
	code := t.m.Run()
	if err := testenv.Cleanup(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		code = max(code, 1)
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	return code
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
	})
}

// TestMigrateScripts gives each script an empty database in WALPOST_POSTGRES_URL, and the commands sql STATEMENT and
// sqlfile FILE, which run as its superuser.
func TestMigrateScripts(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/migrate",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			return newDB(env, pg)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"sql": func(ts *testscript.TestScript, _ bool, args []string) {
				_, err := ts.Stdout().Write([]byte(querySQL(ts, args[0])))
				ts.Check(err)
			},
			"sqlfile": func(ts *testscript.TestScript, _ bool, args []string) { querySQL(ts, ts.ReadFile(args[0])) },
		},
	})
}

// serial numbers the databases: the cluster is shared, also by the runs of -count.
var serial atomic.Int32

func newDB(env *testscript.Env, pg *testenv.Postgres) error {
	name := fmt.Sprintf("script%d", serial.Add(1))
	url, err := pg.CreateDB(context.Background(), name)
	env.Setenv("WALPOST_POSTGRES_URL", url)
	role := name + "_relay" // where a script makes it
	env.Setenv("ROLE", role)
	env.Setenv("ROLE_URL", strings.Replace(url, "postgres@", role+"@", 1))
	return err
}

// TestRunScripts is [TestMigrateScripts] with a NATS server, an address for HTTP, and the command until.
func TestRunScripts(t *testing.T) {
	pg, nats := testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{})
	taken := reserve(t)
	t.Cleanup(func() { _ = taken.Close() }) // and not deferred: the scripts run in parallel, after this function
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/run",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			free := reserve(t)
			env.Setenv("WALPOST_HTTP_LISTEN", free.Addr().String())
			env.Setenv("WALPOST_NATS_URL", nats.URL())
			env.Setenv("TAKEN", taken.Addr().String())
			env.Setenv("WALPOST_SLOT", fmt.Sprintf("script%d", serial.Add(1))) // slots belong to the whole cluster
			return errors.Join(newDB(env, pg), free.Close())
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"until": until,
			"sql":   func(ts *testscript.TestScript, _ bool, args []string) { querySQL(ts, args[0]) },
		},
	})
}

func reserve(t *testing.T) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// until waits: "until GET /path" for a response of 200, "until SQL STATEMENT" for a row that is 1, "until FILE NAME TEXT"
// for a file with a text in it.
func until(ts *testscript.TestScript, _ bool, args []string) {
	holds := func() bool { return querySQL(ts, args[1]) == "1\n" }
	switch args[0] {
	case "FILE":
		holds = func() bool {
			text, err := os.ReadFile(ts.MkAbs(args[1]))
			return err == nil && strings.Contains(string(text), args[2])
		}
	case "GET":
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
		holds = func() bool {
			resp, err := client.Get("http://" + ts.Getenv("WALPOST_HTTP_LISTEN") + args[1])
			if err != nil {
				return false
			}
			_ = resp.Body.Close()
			return resp.StatusCode == http.StatusOK
		}
	}
	for deadline := time.Now().Add(testenv.Patience); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			ts.Fatalf("not within a minute")
		}
	}
}

// exits is exec for a command that must fail with an exit code: exits CODE COMMAND ARGS.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || strconv.Itoa(exit.ExitCode()) != args[0] {
		ts.Fatalf("ended with %v, want exit code %s", err, args[0])
	}
}

// querySQL returns the first column of the last statement's rows, one a line.
func querySQL(ts *testscript.TestScript, sql string) string {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, cmp.Or(ts.Getenv("ADMIN_URL"), ts.Getenv("WALPOST_POSTGRES_URL")))
	ts.Check(err)
	defer conn.Close(ctx) //nolint:errcheck // its statements have ended
	results, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	ts.Check(err)
	out := ""
	for _, row := range results[len(results)-1].Rows {
		out += string(row[0]) + "\n"
	}
	return out
}
