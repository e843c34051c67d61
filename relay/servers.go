package relay

import (
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/publish"
)

// servers are PostgreSQL and JetStream as the start has found them. It sets the fields before the first term;
// nothing writes to them afterwards, and every goroutine reads them.
type servers struct {
	cfg      *Config // each term writes what it reads of the tables into it, see readTables
	template *publish.Template
	nc       *nats.Conn
	stream   *jetstream.Stream
	subjects *publish.Subjects
	envelope *publish.Envelope
	// defaultSource is the source where the configuration names none.
	defaultSource string
}
