package jetstream

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

func must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		if err != nil {
			tb.Fatalf("%v (hint: %s)", err, hint.Of(err))
		}
		return v
	}
}

func connect(tb testing.TB, cfg ConnConfig) *nats.Conn {
	tb.Helper()
	nc := must(Connect(tb.Context(), cfg))(tb)
	closed := make(chan struct{})
	nc.SetClosedHandler(func(*nats.Conn) { close(closed) })
	tb.Cleanup(func() {
		nc.Close()
		<-closed
	})
	return nc
}

// newStream is a fresh server with one stream, EVENTS unless edited.
func newStream(tb testing.TB, opts testenv.NATSOptions, edit func(*jetstream.StreamConfig)) (*nats.Conn, jetstream.Stream) {
	tb.Helper()
	nc := connect(tb, ConnConfig{URL: testenv.NewNATS(tb, opts).URL()})
	cfg := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}
	if edit != nil {
		edit(&cfg)
	}
	return nc, must(testenv.JetStream(tb, nc).CreateStream(tb.Context(), cfg))(tb)
}

func writeFile(tb testing.TB, name, text string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

// wantError checks the parts of an error's text, and that it carries a hint.
func wantError(tb testing.TB, err error, parts ...string) {
	tb.Helper()
	if err == nil {
		tb.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			tb.Errorf("error %q does not say %q", err, p)
		}
	}
	if hint.Of(err) == "" {
		tb.Errorf("error %q has no hint", err)
	}
}

// rig is a server with one stream, EVENTS.
type rig struct {
	t      *testing.T
	nc     *nats.Conn
	js     jetstream.JetStream
	stream *Stream
}

func newRig(t *testing.T, n *testenv.NATS) *rig {
	t.Helper()
	return newRigOver(t, ConnConfig{URL: n.URL()})
}

func newRigOver(t *testing.T, conn ConnConfig) *rig {
	t.Helper()
	r := &rig{t: t}
	var err error
	r.nc, err = Connect(t.Context(), conn)
	r.must(err)
	t.Cleanup(r.nc.Close)
	r.js = testenv.JetStream(r.t, r.nc)
	_, err = r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
	r.must(err)
	r.stream, err = NewStream(r.nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"})
	r.must(err)
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}
