package jetstream

import (
	"testing"

	"github.com/nats-io/nats.go"
)

// What the tests outside the package need: they read what package publish writes, which imports this one.

// ReceivedFrom is received.
var ReceivedFrom = received

// Must is must.
func Must[T any](v T, err error) func(testing.TB) T { return must(v, err) }

// ConnectFor is connect.
func ConnectFor(tb testing.TB, cfg ConnConfig) *nats.Conn {
	tb.Helper()
	return connect(tb, cfg)
}
