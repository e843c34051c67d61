package relay

import (
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// servers are PostgreSQL and JetStream as the start has found them. It sets the fields before the first term;
// nothing but the begin of a term writes to them afterwards, and every goroutine reads them.
type servers struct {
	cfg *Config
	// one is the PostgreSQL server of the term, or of an attempt to start, which begins with another one.
	one atomic.Pointer[pg.OneServer]
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

// server is the term's server.
func (s *servers) server() pg.Config {
	c := s.cfg.server()
	c.One = s.one.Load()
	return c
}

// database is that of the outboxes on the term's server.
func (s *servers) database() table.Config {
	c := s.cfg.database()
	c.One = s.one.Load()
	return c
}
