package relay_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestConnectionChangesAtEachQuestion: a connection to NATS that is lost and made again each
// time the stream is asked where it ends keeps no session from saying so. The relay begins
// when that is over.
func TestConnectionChangesAtEachQuestion(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	proxy := testenv.NewProxy(t, strings.TrimPrefix(r.nats.URL(), "nats://"))
	r.cfg.NATS.URL = "nats://" + proxy.Addr()
	proxy.DropAt("PUB events.")
	x := r.start()
	eventually(t, "the status says why nothing is delivered", func() bool {
		s := x.Status()
		return s.Step == "ask where the stream ends" && strings.Contains(s.LastError, "was lost and made again")
	})
	if x.Ready() == nil {
		t.Error("it is ready")
	}
	proxy.Resume()
	x.streaming()
	r.put(1, 5)
	r.pending(0)
}
