package relay

import (
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// Config is everything that a relay needs to know.
type Config struct {
	// PostgresURL, Slot and Publication: what is read. One relay is active per
	// slot name and database server.
	PostgresURL   string
	PostgresFiles pg.Files // beside the URL
	Slot          string
	Publication   string
	// Outboxes are the tables. The relay works with copies: it adds what the catalog says of them.
	Outboxes []*outbox.Table
	// Own says where walpost's own tables are: in the first outbox's schema where it is zero.
	Own pg.Own
	// Source is the namespace of message ids; empty means
	// "<system id>/<database>".
	Source string

	// NATS, Stream, CreateStream, Subject and Format: what is written.
	NATS         jetstream.ConnConfig
	Stream       jetstream.StreamConfig
	CreateStream bool
	Subject      string
	Format       publish.Format

	// Window (messages) and WindowBytes bound what is unacknowledged.
	Window      int
	WindowBytes int
	// Mode is ModeAuto where it is empty.
	Mode Mode
	// Initial says what a first start does with rows that are pending already:
	// "pending" publishes them, "none" marks them; "" publishes 100,000 and asks
	// where there are more.
	Initial string
	// MaxRetainedWAL is how many bytes of WAL the slot may keep; 0 is no limit.
	MaxRetainedWAL int64

	// DelayThreshold: a row whose available_at lies further than this after its
	// commit waits in the table.
	DelayThreshold time.Duration
	// FallbackInterval is the longest pause between two searches of the tables,
	// 30 s where it is zero; FallbackBatch how many rows one statement reads, 100.
	FallbackInterval time.Duration
	FallbackBatch    int
	// Retry and OnPoison: what becomes of rows that fail. 30 s and 10 attempts, and
	// fallback.Hold, where they are zero.
	Retry    table.Retry
	OnPoison fallback.OnPoison
	// Retention is off where it is zero.
	Retention Retention

	// Check, if set, is asked about each row that could be sent. Its error is a *outbox.RowError: the row is
	// parked. One goroutine at a time calls it, between two messages.
	Check func(*outbox.Event) error

	// Tracer makes spans of the rows that are sampled; nil traces nothing. TraceRatio, from 0 to 1, is the
	// part of the traces that is sampled, by their ids. Rows whose traceparent is not sampled are not
	// traced.
	Tracer     trace.Tracer
	TraceRatio float64

	// Once has Run end by itself when everything is settled that was committed before it began. Run fails if
	// that cannot be: see once.
	Once bool

	// OnStored, if set, is called with the time from each commit to its PubAck.
	// It must not block.
	OnStored func(time.Duration)
}

func (c *Config) setDefaults() {
	if c.Mode == "" {
		c.Mode = ModeAuto
	}
	if c.FallbackInterval == 0 {
		c.FallbackInterval = 30 * time.Second
	}
	if c.FallbackBatch == 0 {
		c.FallbackBatch = 100
	}
	if c.Retry == (table.Retry{}) {
		c.Retry = table.Retry{Backoff: 30 * time.Second, MaxAttempts: 10}
	}
	if c.OnPoison == "" {
		c.OnPoison = fallback.Hold
	}
}

// server is the one of the outboxes.
func (c *Config) server() pg.Config {
	return pg.Config{URL: c.PostgresURL, Files: c.PostgresFiles}
}

func (c *Config) database() table.Config {
	return table.Config{
		URL: c.PostgresURL, Files: c.PostgresFiles, Settings: stream.Settings,
		Dial: stream.Dialer().DialContext,
		Slot: c.Slot, Serves: table.Serving(c.Outboxes, c.Stream.Name, c.Stream.Domain),
		Own: pg.OwnOf(c.Own.Schema, c.Own.Owner, c.Outboxes),
	}
}
