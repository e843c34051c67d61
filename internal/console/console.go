// Package console is walpost's console: a page in the browser, and the JSON API that the page asks. It reads
// what the commands read. It has few connections to PostgreSQL, and a statement takes four seconds at most:
// a relay in the same process does not wait for it.
package console

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Config is what a console shows, and to whom.
type Config struct {
	Version string
	// Token is what every call of the API has to carry. Without one, reads are open and nothing can be
	// changed.
	Token string

	Postgres table.Config
	Outboxes []*outbox.Table
	NATS     jetstream.ConnConfig
	Stream   jetstream.StreamConfig
	Subject  string
	// Budget is the WAL in bytes that the slot may hold back; 0 is no limit.
	Budget int64

	// Relay reads the relay's own status, as JSON.
	Relay func(context.Context) (json.RawMessage, error)
	// Metrics reads the relay's metrics.
	Metrics func(context.Context) ([]*dto.MetricFamily, error)
	// Doctor is what `walpost doctor` finds.
	Doctor func(context.Context) (check.Findings, error)
	// Docs serves the documentation below /ui/docs/.
	Docs http.Handler
	Log  *zap.Logger
}

// Console answers requests below /ui/. Its handler works while Run runs.
type Console struct {
	cfg     Config
	handler http.Handler
	ended   chan struct{} // closed when Run ends
	tails   chan struct{} // the viewers that follow the stream
	servers *servers
	history history
	share
}

// New does no I/O.
func New(cfg Config) *Console {
	c := &Console{cfg: cfg, ended: make(chan struct{}), tails: make(chan struct{}, mostTails)}
	c.servers = newServers(&c.cfg)
	c.handler = c.secure(c.routes())
	return c
}

// ServeHTTP implements http.Handler.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.handler.ServeHTTP(w, r) }

// Run samples the metrics until ctx is done, and then ends what follows the stream.
func (c *Console) Run(ctx context.Context) {
	defer c.servers.close()
	defer close(c.ended)
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	c.sample(ctx, time.Now())
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			c.sample(ctx, now)
			c.servers.closeIdle(now.Add(-keepIdle))
		}
	}
}
