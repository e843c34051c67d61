package testenv

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsTimeout is for a connection or a request, where nats.go's two and five seconds pass on a slow machine.
// A request whose server ends waits for all of it.
const natsTimeout = time.Minute

// ConnectNATS connects to a server, and closes the connection when the test ends.
func ConnectNATS(tb testing.TB, url string, opts ...nats.Option) *nats.Conn {
	tb.Helper()
	nc, err := nats.Connect(url, append(opts, nats.Timeout(natsTimeout))...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	return nc
}

// JetStream is a client for requests whose contexts have no deadline.
func JetStream(tb testing.TB, nc *nats.Conn) jetstream.JetStream {
	tb.Helper()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(natsTimeout))
	if err != nil {
		tb.Fatal(err)
	}
	return js
}
