package console

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// mostConnections is how many there are to PostgreSQL at once.
	mostConnections = 2
	// keepIdle is how long a connection stays open after nobody has asked for anything.
	keepIdle = time.Minute
	// statementLimit bounds a statement.
	statementLimit = 4 * time.Second
	// natsPatience bounds the first contact with NATS.
	natsPatience = 2 * time.Second
)

// servers has the console's connections: two to PostgreSQL and one to NATS. They are opened when somebody
// asks.
type servers struct {
	cfg   *Config
	turns chan struct{}

	mu     sync.Mutex // guards idle and closed
	idle   []idleDB
	closed bool

	// natsMu guards what follows, and is held while NATS is connected to. mu may be locked under it.
	natsMu sync.Mutex
	nc     *nats.Conn
	asked  time.Time
}

type idleDB struct {
	*table.DB
	since time.Time
}

func newServers(cfg *Config) *servers {
	return &servers{cfg: cfg, turns: make(chan struct{}, mostConnections)}
}

// postgres lends a connection. A statement takes statementLimit at most.
func (s *servers) postgres(ctx context.Context, use func(*table.DB) error) error {
	select {
	case s.turns <- struct{}{}:
	case <-ctx.Done():
		return refuse(http.StatusServiceUnavailable, "ask again in a few seconds",
			"the console's connections to PostgreSQL are busy")
	}
	defer func() { <-s.turns }()
	db, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer s.give(db)
	return use(db)
}

func (s *servers) take(ctx context.Context) (*table.DB, error) {
	for {
		s.mu.Lock()
		n := len(s.idle)
		if n == 0 {
			s.mu.Unlock()
			return table.OpenConsole(ctx, s.cfg.Postgres, statementLimit)
		}
		db := s.idle[n-1].DB
		s.idle = s.idle[:n-1]
		s.mu.Unlock()
		if db.Ping(ctx) == nil { // the server may have ended it
			return db, nil
		}
		db.Close()
	}
}

func (s *servers) give(db *table.DB) {
	s.mu.Lock()
	keep := !s.closed && db.Alive()
	if keep {
		s.idle = append(s.idle, idleDB{db, time.Now()})
	}
	s.mu.Unlock()
	if !keep {
		db.Close()
	}
}

// tables are copies: to complete one changes it.
func (s *servers) tables() []*outbox.Table {
	all := slices.Clone(s.cfg.Outboxes)
	for i, t := range all {
		own := *t
		all[i] = &own
	}
	return all
}

// stream is a stream on the console's connection to NATS.
func (s *servers) stream(ctx context.Context, name string) (*jetstream.Stream, error) {
	s.natsMu.Lock()
	defer s.natsMu.Unlock()
	s.asked = time.Now()
	if s.nc == nil || s.nc.IsClosed() {
		if s.isClosed() {
			return nil, fmt.Errorf("connect to NATS: %w", context.Canceled)
		}
		nc, err := s.connect(ctx)
		if err != nil {
			return nil, err
		}
		s.nc = nc
	}
	cfg := s.cfg.Stream
	cfg.Name = name
	return jetstream.NewStream(s.nc, cfg)
}

func (s *servers) connect(ctx context.Context) (*nats.Conn, error) {
	conn := s.cfg.NATS
	conn.Timeout = natsPatience
	return jetstream.Connect(ctx, conn)
}

// closeIdle closes what nobody has used since a time.
func (s *servers) closeIdle(since time.Time) {
	var old []*table.DB
	s.mu.Lock()
	s.idle = slices.DeleteFunc(s.idle, func(db idleDB) bool {
		if db.since.Before(since) {
			old = append(old, db.DB)
			return true
		}
		return false
	})
	s.mu.Unlock()
	for _, db := range old {
		db.Close()
	}
	s.natsMu.Lock()
	defer s.natsMu.Unlock()
	if s.nc != nil && s.asked.Before(since) {
		s.nc.Close()
		s.nc = nil
	}
}

func (s *servers) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// close closes all of them. What is in use is closed when it is given back.
func (s *servers) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.closeIdle(time.Now().Add(time.Hour))
}
