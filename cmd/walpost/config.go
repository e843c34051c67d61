package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Config is the whole configuration of the relay. What each field means, its key, environment variable, unit,
// default and limits stand in one place, the table of [Config.keys]; `walpost config example` prints it.
type Config struct {
	Postgres  PostgresConfig
	Source    string
	Shard     string
	Outboxes  []OutboxConfig
	NATS      NATSConfig
	Publish   PublishConfig
	Mode      string
	Fallback  FallbackConfig
	Catalog   CatalogConfig
	Retention RetentionConfig
	HTTP      HTTPConfig
	OTLP      OTLPConfig
	Log       LogConfig
}

// PostgresConfig says where the outbox is and what the relay keeps there.
type PostgresConfig struct {
	// URL is empty where URLFile or the PG* variables of libpq take its place.
	URL            string
	URLFile        string
	PasswordFile   string
	Slot           string
	Publication    string
	MaxRetainedWAL int64
	Initial        string
	Schema, Owner  string
}

// inboxPrefix is where acknowledgements come back: others may be kept from it.
func (c *Config) inboxPrefix() string {
	return cmp.Or(c.NATS.InboxPrefix, "_WALPOST."+c.Postgres.Slot)
}

// own is where walpost's own tables are.
func (p *PostgresConfig) own(outboxes []*outbox.Table) pg.Own {
	return pg.OwnOf(p.Schema, p.Owner, outboxes)
}

// server is the database of the outboxes.
func (p *PostgresConfig) server() pg.Config { return pg.Config{URL: p.URL, Files: p.files()} }

func (p *PostgresConfig) files() pg.Files { return pg.Files{URL: p.URLFile, Password: p.PasswordFile} }

// OutboxConfig is one outbox table.
type OutboxConfig struct {
	Table   string
	Name    string // "" is the table's
	Layout  LayoutConfig
	Mark    MarkConfig
	Where   string
	Headers HeadersConfig
}

// MarkConfig is how a stored row is taken out: the name of a mark, or a status.
type MarkConfig struct {
	Name   string // "update" where Column is set
	Column string
	States [outbox.NumStates]string
}

// HeadersConfig are the columns that become headers. Where it is not set, they are the layout's own.
type HeadersConfig struct {
	Set  bool
	List []outbox.Header
}

// LayoutConfig is either the name of a layout or the columns one by one, field to column.
type LayoutConfig struct {
	Name    string
	Columns map[string]string
}

// NATSConfig says where the events go, and as whom.
type NATSConfig struct {
	URL              string
	Creds            string
	NKey             string
	User             string
	PasswordFile     string
	TokenFile        string
	TLS              TLSConfig
	Domain           string
	InboxPrefix      string
	Shared           bool
	AcceptWeakStream bool
	Stream           string
	CreateStream     bool
	Subject          string
	Format           string
}

// TLSConfig names files in PEM.
type TLSConfig struct {
	CA             string
	Cert           string
	Key            string
	HandshakeFirst bool
}

// PublishConfig bounds what is on its way to JetStream.
type PublishConfig struct {
	Window      int
	WindowBytes int64
	Batch       string
}

// FallbackConfig is about the rows that the WAL does not deliver.
type FallbackConfig struct {
	Interval       time.Duration
	Batch          int
	DelayThreshold time.Duration
	MaxAttempts    int
	Backoff        time.Duration
	OnPoison       string
}

// CatalogConfig is about the event catalogue.
type CatalogConfig struct {
	Path    string
	Unknown string
}

// RetentionConfig is about delivered rows.
type RetentionConfig struct {
	ArchiveAfter  time.Duration
	DeleteAfter   time.Duration
	ExcludedAfter time.Duration
	DropAfter     time.Duration
	Interval      time.Duration
}

// HTTPConfig is the relay's own server.
type HTTPConfig struct {
	Listen    string
	UI        bool
	TokenFile string
}

// OTLPConfig is about an OpenTelemetry collector.
type OTLPConfig struct {
	Endpoint        string
	TraceRatio      float64
	MetricsInterval time.Duration
}

// LogConfig is about standard error.
type LogConfig struct {
	Level  string
	Format string
}

func defaultConfig() *Config {
	c := &Config{Outboxes: make([]OutboxConfig, 1)}
	setDefaults(c.keys())
	return c
}

func defaultOutbox() OutboxConfig {
	c := &Config{Outboxes: make([]OutboxConfig, 1)}
	setDefaults(c.outboxKeys(0))
	return c.Outboxes[0]
}

func setDefaults(keys []key) {
	for _, k := range keys {
		if err := k.Set(k.initial); err != nil {
			panic(fmt.Sprintf("default of %s: %v", k.name, err))
		}
	}
}

const defaultSlot = "walpost"

// Tables are the outboxes as the other packages take them. A configuration that was validated has no error
// here.
func (c *Config) Tables() ([]*outbox.Table, error) {
	shard, err := outbox.ParseShard(c.Shard)
	if err != nil {
		return nil, err
	}
	tables := make([]*outbox.Table, len(c.Outboxes))
	for i, o := range c.Outboxes {
		schema, name, err := outbox.ParseTable(o.Table)
		if err != nil {
			return nil, err
		}
		layout, err := o.layout()
		if err != nil {
			return nil, err
		}
		tables[i] = &outbox.Table{
			Schema: schema, Name: name, Given: o.Name, Layout: layout, Mark: outbox.Mark(o.Mark.Name),
			Shard: shard, Where: o.Where,
		}
	}
	return tables, nil
}

// layout is what the keys of an outbox make of its layout together.
func (o *OutboxConfig) layout() (outbox.Layout, error) {
	layout, err := o.Layout.resolve()
	if err != nil {
		return layout, err
	}
	if o.Mark.Column != "" {
		layout.SetStatus(o.Mark.Column, o.Mark.States)
	}
	if o.Headers.Set {
		layout.SetHeaders(o.Headers.List)
	}
	if o.Mark.Name == string(outbox.MarkJournal) {
		layout = layout.Journaled()
	}
	return layout, nil
}

func (l LayoutConfig) resolve() (outbox.Layout, error) {
	if l.Columns != nil {
		return outbox.CustomLayout(l.Columns)
	}
	layout, ok := outbox.LayoutNamed(l.Name)
	if !ok {
		return layout, hint.Errorf(didYouMean(l.Name, outbox.LayoutNames()),
			"unknown layout %q, want %s, or a map of columns", l.Name,
			strings.Join(outbox.LayoutNames(), ", "))
	}
	return layout, nil
}
