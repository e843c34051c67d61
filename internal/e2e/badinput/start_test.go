package badinput

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// badStart is one thing that is wrong. Its name is also its database's, its
// slot's and its stream's.
type badStart struct {
	name string
	// sql makes it wrong in a database of its own, as the superuser. Without it
	// the case shares a database.
	sql string
	// then is done after it, each statement in a transaction of its own.
	then []string
	// stream exists, under the case's name where it has none.
	stream *jetstream.StreamConfig
	// user is the role that the relay connects as, the superuser where it is "".
	user string
	// env is laid over the configuration, which is right; "" takes a variable out.
	env map[string]string
	// pooler is the URL of the pooler that it goes through.
	pooler string
	// file is its walpost.yaml.
	file string
	// code is the exit code, 1 where it is 0.
	code int
	// waits: the start tries again until it is told to end.
	waits bool
}

// ready is the database of the cases that have none of their own.
const ready = "ready"

func (c *badStart) database() string {
	if c.sql == "" {
		return ready
	}
	return c.name
}

// arrange makes in both servers what the case needs.
func (c *badStart) arrange(s *site) {
	s.t.Helper()
	if c.sql != "" {
		s.newDB(c.name, c.sql)
	}
	for _, sql := range c.then {
		s.must(s.pg.Exec(s.t.Context(), c.database(), sql))
	}
	if c.stream == nil {
		return
	}
	if c.stream.Name == "" {
		c.stream.Name = c.name
	}
	config := *c.stream
	config.Sealed = false // no stream is born so
	_, err := s.js.CreateStream(s.t.Context(), config)
	s.must(err)
	if c.stream.Sealed {
		_, err = s.js.UpdateStream(s.t.Context(), *c.stream)
		s.must(err)
	}
}

// environment is a right configuration with what is wrong in this case. The
// stream may be created.
func (c *badStart) environment(s *site) []string {
	user := c.user
	if user == "" {
		user = "postgres"
	}
	env := map[string]string{
		"WALPOST_POSTGRES_URL": s.pg.URLFor(user, c.database()),
		"WALPOST_SLOT":         c.name,
		"WALPOST_NATS_URL":     s.natsURL("app"),
		"WALPOST_STREAM":       c.name,
		"WALPOST_SUBJECT":      c.name + ".{event_type}",
		"WALPOST_HTTP_LISTEN":  "",
	}
	maps.Copy(env, c.env)
	var list []string
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list
}

// promptly is more than any timeout at the start: the machine may be busy.
const promptly = time.Minute

// outcome is how a start ended.
type outcome struct {
	err            error
	after          time.Duration
	stdout, stderr bytes.Buffer
	// doctor is what `walpost doctor --json` said about the same.
	doctor diagnosis
	// left is what is set in a pooler's session afterwards. It is asked for at
	// once: what the relay sets ends the session when nobody uses it.
	left    []string
	leftErr error
}

// start runs the program in dir until it ends, or waits.
func (c *badStart) start(ctx context.Context, s *site, dir string) (o outcome) {
	ctx, cancel := context.WithTimeout(ctx, 2*promptly)
	defer cancel()
	starting, stop := context.WithTimeout(ctx, promptly)
	defer stop()
	cmd := exec.CommandContext(starting, s.program, "run")
	cmd.Dir, cmd.Env = dir, c.environment(s)
	cmd.Stdout, cmd.Stderr = &o.stdout, &o.stderr
	if c.waits {
		cmd.Stderr = &endWhenWaiting{to: &o.stderr, end: func() error { return cmd.Process.Signal(syscall.SIGTERM) }}
	}
	began := time.Now()
	o.err = cmd.Run()
	o.after = time.Since(began)
	o.doctor = diagnose(ctx, s, dir, c.environment(s))
	if c.pooler != "" {
		o.left, o.leftErr = pooled(ctx, c.pooler)
	}
	return o
}

// judge holds a start to its exit code and its text.
func (c *badStart) judge(t *testing.T, s *site, o outcome) {
	t.Logf("ended after %s", o.after.Round(10*time.Millisecond))
	if o.after >= promptly {
		t.Fatalf("has not ended by itself:\n%s", &o.stderr)
	}
	var exit *exec.ExitError
	if want := max(c.code, 1); !c.waits && (!errors.As(o.err, &exit) || exit.ExitCode() != want) {
		t.Errorf("ended with %v, want exit code %d", o.err, want)
	}
	if c.waits && o.err != nil {
		t.Errorf("ended with %v when it was told to, want exit code 0", o.err)
	}
	if o.stdout.Len() > 0 {
		t.Errorf("standard output: %s", &o.stdout)
	}
	if o.left != nil || o.leftErr != nil {
		t.Errorf("the pooler's session has been changed: %q, %v", o.left, o.leftErr)
	}
	got := vary(strings.NewReplacer(s.names...).Replace(spoken(o.stderr.String()) + waited(o.stderr.String())))
	if want := wanted(t, c.name); got != want {
		t.Errorf("standard error says\n%s\nwant\n%s\nand the log\n%s", got, want, &o.stderr)
	}
	c.agree(t, o, exit)
}

// varying is what no start knows before.
var varying = []struct {
	of *regexp.Regexp
	is string
}{
	{regexp.MustCompile(`127\.0\.0\.1:\d+->`), "HERE->"}, // this side's address
	{regexp.MustCompile(`(_WALPOST\.\w+)\.\w+`), "$1.x"},
	{regexp.MustCompile(`(startup parameter:) \w+`), "$1 x"}, // they are sent in any order
}

// spoken is standard error without the log, which is JSON here.
func spoken(stderr string) string {
	var lines strings.Builder
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "{") {
			lines.WriteString(line)
		}
	}
	return lines.String()
}

const waiting = "start waits for a server, and tries again"

// endWhenWaiting ends the program when it says that it waits.
type endWhenWaiting struct {
	to  io.Writer
	end func() error
}

func (w *endWhenWaiting) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(waiting)) {
		_ = w.end() // it has ended where it did not wait after all
	}
	return w.to.Write(p)
}

// waited is what the log says that is waited for, as standard error would.
func waited(stderr string) string {
	for line := range strings.Lines(stderr) {
		var entry struct{ Msg, Error, Hint string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == waiting {
			return "error: " + inOneLine(entry.Error) + "\nhint: " + entry.Hint + "\n"
		}
	}
	return ""
}

// inOneLine is an error of pgx as standard error has it: it tries a server with TLS and without, and fails twice alike.
func inOneLine(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.Join(slices.Compact(lines), " ")
}

// atATime is more than there are cores: some starts only wait for a timeout.
const atATime = 6

// run arranges all cases, starts them, and compares both servers with what they
// were before the first start.
func run(t *testing.T, s *site, cases []badStart) {
	t.Helper()
	for i := range cases {
		cases[i].arrange(s)
	}
	before := s.snapshot()
	outcomes := make([]chan outcome, len(cases))
	slots := make(chan struct{}, atATime)
	for i := range cases {
		dir := t.TempDir()
		if cases[i].file != "" {
			writeFile(t, dir, "walpost.yaml", cases[i].file)
		}
		outcomes[i] = make(chan outcome, 1)
		go func() {
			slots <- struct{}{}
			outcomes[i] <- cases[i].start(t.Context(), s, dir)
			<-slots
		}()
	}
	for i := range cases {
		o := <-outcomes[i]
		t.Run(cases[i].name, func(t *testing.T) { cases[i].judge(t, s, o) })
	}
	compare(t, before, s.snapshot())
}
