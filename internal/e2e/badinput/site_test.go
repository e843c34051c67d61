package badinput

import (
	_ "embed"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/walpost/walpost/internal/testenv"
)

// site is the servers that the relay is started against, and what stands ready
// in them.
type site struct {
	t       *testing.T
	program string
	pg      *testenv.Postgres
	nats    *testenv.NATS
	js      jetstream.JetStream
	// names stand in the wanted texts for what differs from run to run.
	names []string
}

// accounts: app may do everything, the others lack one thing each.
const accounts = `
accounts {
	APP {
		jetstream: enabled
		users: [
			{user: app, password: secret}
			{user: noinfo, password: secret, permissions: {publish: {deny: "$JS.API.STREAM.INFO.>"}}}
			{user: nocreate, password: secret, permissions: {publish: {deny: "$JS.API.STREAM.CREATE.>"}}}
			{user: noread, password: secret, permissions: {publish: {deny: ["$JS.API.STREAM.MSG.GET.>", "$JS.API.CONSUMER.>"]}}}
			{user: nopublish, password: secret, permissions: {publish: {deny: "nopublish.>"}}}
			{user: noinbox, password: secret, permissions: {subscribe: {deny: "_WALPOST.>"}}}
		]
	}
	FULL { jetstream: {max_streams: 1}, users: [{user: full, password: secret}] }
	PLAIN { users: [{user: plain, password: secret}] }
}
`

func newSite(t *testing.T, pg *testenv.Postgres) *site {
	t.Helper()
	s := &site{t: t, pg: pg, nats: testenv.NewNATS(t, testenv.NATSOptions{Config: accounts})}
	var err error
	s.program, err = testenv.Build(t.Context(), "github.com/walpost/walpost/cmd/walpost", buildFlags...)
	s.must(err)
	s.called(hostPort(s.pg.URL("x")), "PG")
	s.called(hostPort(s.nats.URL()), "NATS")
	s.js = s.jetStream("app")
	s.newTemplate()
	return s
}

func (s *site) jetStream(user string) jetstream.JetStream {
	s.t.Helper()
	nc := testenv.ConnectNATS(s.t, s.natsURL(user))
	return testenv.JetStream(s.t, nc)
}

// called gives a value of this run its name in the wanted texts.
func (s *site) called(value, name string) { s.names = append(s.names, value, name) }

//go:embed testdata/stderr.txtar
var stderrTexts []byte

// wanted is what a case has to say on standard error: the file of its name.
func wanted(t *testing.T, name string) string {
	t.Helper()
	for _, f := range txtar.Parse(stderrTexts).Files {
		if f.Name == name {
			return string(f.Data)
		}
	}
	t.Errorf("testdata/stderr.txtar has nothing about %s", name)
	return ""
}

func hostPort(url string) string {
	_, rest, _ := strings.Cut(url, "://")
	rest = rest[strings.LastIndexByte(rest, '@')+1:]
	rest, _, _ = strings.Cut(rest, "/")
	return rest
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) natsURL(user string) string {
	return fmt.Sprintf("nats://%s:secret@%s", user, hostPort(s.nats.URL()))
}

// newTemplate makes the database that all others are copies of: migrated, but
// without the publication, so that a start which goes too far leaves one.
func (s *site) newTemplate() {
	url, err := s.pg.CreateDB(s.t.Context(), "template")
	s.must(err)
	cmd := exec.Command(s.program, "migrate", "up")
	cmd.Dir, cmd.Env = s.t.TempDir(), []string{"WALPOST_POSTGRES_URL=" + url}
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("walpost migrate up: %v\n%s", err, out)
	}
	s.must(s.pg.Exec(s.t.Context(), "template", "DROP PUBLICATION walpost"))
	s.newDB(ready, "")
}

// newDB makes a case's own database and runs sql in it.
func (s *site) newDB(name, sql string) {
	s.t.Helper()
	identifier := pgx.Identifier{name}.Sanitize()
	s.must(s.pg.Exec(s.t.Context(), "postgres", "CREATE DATABASE "+identifier+" TEMPLATE template"))
	if err := s.pg.Exec(s.t.Context(), name, sql); err != nil {
		s.t.Fatalf("prepare %s: %v", name, err)
	}
}

// file writes a file and returns its path, which is called DIR/name.
func (s *site) file(name, content string) string {
	s.t.Helper()
	dir := s.t.TempDir()
	s.called(dir, "DIR")
	path := filepath.Join(dir, name)
	s.must(os.WriteFile(path, []byte(content), 0o600))
	return path
}

// listen occupies an address. A connection to it is taken by the system and
// hears nothing.
func (s *site) listen(name string) string {
	s.t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	s.must(err)
	s.t.Cleanup(func() { _ = ln.Close() })
	s.called(ln.Addr().String(), name)
	return ln.Addr().String()
}
