package relay

import (
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// servers are PostgreSQL and JetStream as the start has found them. It sets the fields before the first term;
// nothing but the begin of a term writes to them afterwards, and every goroutine reads them.
type servers struct {
	cfg *Config
	// outboxes are those of the configuration that are delivered, see readTables.
	outboxes []*outbox.Table
	aside    []SetAside // the others
	template *publish.Template
	nc       *nats.Conn
	stream   *jetstream.Stream
	subjects *publish.Subjects
	envelope *publish.Envelope
	// defaultSource is the source where the configuration names none.
	defaultSource string
}
