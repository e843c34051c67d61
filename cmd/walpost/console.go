package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/console"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/secretfile"
	"github.com/walpost/walpost/publish"
)

// consoleConfig translates the configuration for the console. name is what the servers show.
func consoleConfig(cfg *Config, name string, log *zap.Logger) (console.Config, error) {
	tables, err := cfg.Tables()
	if err != nil {
		return console.Config{}, err
	}
	template, err := publish.NewTemplate(cfg.NATS.Subject)
	if err != nil {
		return console.Config{}, &usageError{err}
	}
	conn := natsConn(cfg)
	conn.Name = name
	return console.Config{
		Version:  buildVersion().Version,
		Postgres: database(cfg, name), Outboxes: tables,
		NATS: conn,
		Stream: jetstream.StreamConfig{
			Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain, Shared: cfg.NATS.Shared,
			Pattern: template.Pattern(), Partitions: template.Partitions(),
		},
		Subject: cfg.NATS.Subject, Budget: cfg.Postgres.MaxRetainedWAL,
		Doctor: func(ctx context.Context) (check.Findings, error) { return diagnose(ctx, cfg) },
		Docs:   http.StripPrefix("/ui/docs", documentation().Handler()),
		Log:    log,
	}, nil
}

// runConsole configures the console of a relay in this process, nil where http.ui is off.
func runConsole(
	cfg *Config, health Health, metrics prometheus.Gatherer, log *zap.Logger,
) (*console.Config, error) {
	if !cfg.HTTP.UI {
		return nil, nil
	}
	config, err := consoleConfig(cfg, "walpost console", log)
	if err == nil {
		config.Token, err = cfg.HTTP.token()
	}
	config.Relay = func(context.Context) (json.RawMessage, error) { return json.Marshal(health.Status()) }
	config.Metrics = func(context.Context) ([]*dto.MetricFamily, error) { return metrics.Gather() }
	return &config, err
}

// leastToken is how many characters a token has at least: one that can be guessed is none.
const leastToken = 16

// token is that of the console, "" for none.
func (h *HTTPConfig) token() (string, error) {
	if h.TokenFile == "" {
		return "", nil
	}
	token, err := secretfile.Read("http.token_file", h.TokenFile)
	if err == nil && utf8.RuneCountInString(token) < leastToken {
		err = hint.Errorf("write a longer one, as `openssl rand -hex 16` makes it",
			"http.token_file: the token in %s is shorter than %d characters", h.TokenFile, leastToken)
	}
	if err != nil {
		return "", &usageError{err}
	}
	return token, nil
}

// isLoopback tells of an address that is listened on.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
