package relay_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/testenv"
)

// TestForeignFlood: another writer's messages come faster than sessions begin. The alarm says that nothing is delivered. When they end,
// everything is.
func TestForeignFlood(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	var over atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !over.Load() && nc.Publish("events.foreign", []byte(`{}`)) == nil {
			time.Sleep(time.Millisecond)
		}
	}()
	r.put(1, 100)
	eventually(t, "the alarm says that nothing is delivered", func() bool {
		r.exec(putSQL, "order.placed", 0, 0)
		for _, e := range x.logs.FilterField(zap.String("alarm", "foreign_message")).All() {
			if detail, _ := e.ContextMap()["detail"].(string); strings.HasPrefix(detail, "nothing is delivered: ") {
				return true
			}
		}
		return false
	})
	over.Store(true)
	<-done
	r.pending(0)
	x.halt()
}
