package main

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/telemetry"
)

func newRunCommand() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Relay the outbox until SIGTERM or SIGINT",
		Long:  help("run"),
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			return runCommand(cmd.Context(), cfg, once, cmd.ErrOrStderr())
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "deliver what is pending now, and end")
	addConfigFlags(cmd)
	return cmd
}

func runCommand(ctx context.Context, cfg *Config, once bool, stderr io.Writer) error {
	log, err := newLogger(cfg.Log, stderr)
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // standard error is not buffered, and a terminal refuses to be synced
	check, err := eventCheck(&cfg.Catalog)
	if err != nil {
		return err
	}
	registry := newRegistry()
	exporter, err := newExporter(ctx, cfg, registry, log)
	if err != nil {
		return err
	}
	defer closeExporter(ctx, exporter)
	relay, err := newRelay(cfg, log, registry, hooks{check: check, tracer: exporter.Tracer(), once: once})
	if err != nil {
		return err
	}
	if once { // nobody watches it: no HTTP, which another relay on this machine may serve
		log.Info("walpost runs once", zap.String("version", buildVersion().Version),
			zap.String("slot", cfg.Postgres.Slot), zap.String("stream", cfg.NATS.Stream))
		return relay.Run(ctx)
	}
	ui, err := runConsole(cfg, relay, registry, log)
	if err != nil {
		return err
	}
	server := newHTTPServer(cfg.HTTP.Listen, registry, relay, log)
	if err := server.Listen(ctx); err != nil {
		return err
	}
	server.mount(ui)
	log.Info("walpost starts", zap.String("version", buildVersion().Version),
		zap.String("slot", cfg.Postgres.Slot), zap.String("stream", cfg.NATS.Stream),
		zap.String("http", server.Addr()))
	err = runBoth(ctx, relay, server)
	if err == nil {
		log.Info("walpost ends")
	}
	return err
}

// newExporter sends traces and metrics where the configuration has a collector.
func newExporter(
	ctx context.Context, cfg *Config, metrics prometheus.Gatherer, log *zap.Logger,
) (*telemetry.Exporter, error) {
	said := &sayRarely{every: time.Minute}
	return telemetry.New(ctx, telemetry.Config{
		Endpoint: cfg.OTLP.Endpoint, Traces: cfg.OTLP.TraceRatio > 0,
		MetricsInterval: cfg.OTLP.MetricsInterval, Metrics: metrics,
		Version: buildVersion().Version, Slot: cfg.Postgres.Slot, Stream: cfg.NATS.Stream,
		OnError: func(err error) {
			if said.due() {
				log.Warn("telemetry is dropped", zap.Error(err), zap.String("hint",
					"check otlp.endpoint (WALPOST_OTLP_ENDPOINT) and the collector; "+
						"events are relayed all the same"))
			}
		},
	})
}

// sayRarely is for what would be said again and again.
type sayRarely struct {
	every time.Duration
	mu    sync.Mutex // guards last
	last  time.Time
}

func (s *sayRarely) due() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.last) < s.every {
		return false
	}
	s.last = time.Now()
	return true
}

// exportRest is how long what is left at the end may take.
const exportRest = 3 * time.Second

func closeExporter(ctx context.Context, e *telemetry.Exporter) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exportRest)
	defer cancel()
	_ = e.Close(ctx) // OnError was told
}

// runBoth runs the relay beside the server. The server outlives the relay, so that draining can be watched. A
// server that fails ends the relay: without it the relay could not be watched.
func runBoth(ctx context.Context, relay interface{ Run(context.Context) error }, server *httpServer) error {
	relayCtx, stopRelay := context.WithCancel(ctx)
	defer stopRelay()
	serverCtx, stopServer := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServer()
	served := make(chan error, 1)
	go func() {
		defer stopRelay()
		served <- server.Run(serverCtx)
	}()
	err := relay.Run(relayCtx)
	stopServer()
	return errors.Join(err, <-served)
}

// newRegistry has what every Go process reports, and walpost_build_info.
func newRegistry() *prometheus.Registry {
	b := buildVersion()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "walpost_build_info",
		Help:        "The build that is running, in its labels; always 1.",
		ConstLabels: prometheus.Labels{"version": b.Version, "revision": b.Revision, "goversion": b.Go},
	})
	info.Set(1)
	registry := prometheus.NewRegistry()
	registry.MustRegister(info, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}
