package main

import (
	"context"
	"maps"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/stream"
)

// countMost is where counting stops.
const countMost = status.CountMost

func newStatusCommand() *cobra.Command {
	var asJSON, watch bool
	cmd := &cobra.Command{
		Use: "status", Short: "Show what runs now: relay, slot, backlog, dead letters, stream",
		Long: help("status"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			if watch {
				return watchStatus(cmd, cfg, asJSON)
			}
			r, err := askStatus(cmd.Context(), cfg)
			return apart(printStatus(cmd.OutOrStdout(), r, cfg, asJSON), err)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "report every two seconds, until Ctrl-C")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

// askStatus asks both servers. The report is there even if they cannot be asked.
func askStatus(ctx context.Context, cfg *Config) (*status.Report, error) {
	r := status.New()
	errs := problems{}
	for _, server := range []struct {
		name string
		ask  func(context.Context, *status.Report, *Config) error
	}{{"postgres", askPostgres}, {"nats", askNATS}} {
		if err := server.ask(ctx, r, cfg); err != nil {
			errs = append(errs, err)
			r.Fail(server.name, err)
		}
	}
	return r, apart(errs...)
}

// database is how a command reaches PostgreSQL, under the name that the server shows.
func database(cfg *Config, name string) table.Config {
	settings := maps.Clone(stream.Settings)
	settings["application_name"] = name
	tables, _ := cfg.Tables() // they were checked when they were read
	return table.Config{
		URL: cfg.Postgres.URL, Files: cfg.Postgres.files(), Settings: settings,
		Dial: stream.Dialer().DialContext, Slot: cfg.Postgres.Slot, Own: cfg.Postgres.own(tables),
		Serves: table.Serving(tables, cfg.NATS.Stream, cfg.NATS.Domain),
	}
}

// openLook connects a command that looks at a relay's work from outside.
func openLook(ctx context.Context, cfg *Config, name string) (*table.DB, error) {
	return table.OpenLook(ctx, database(cfg, name))
}

func askPostgres(ctx context.Context, r *status.Report, cfg *Config) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	db, err := openLook(ctx, cfg, "walpost status")
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Limit(ctx, status.Look); err != nil {
		return err
	}
	return r.AskPostgres(ctx, db, cfg.Postgres.Slot, tables)
}

func askNATS(ctx context.Context, r *status.Report, cfg *Config) error {
	conn := natsConn(cfg)
	conn.Name = "walpost status"
	nc, err := jetstream.Connect(ctx, conn)
	if err != nil {
		return err
	}
	defer nc.Close()
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain})
	if err != nil {
		return err
	}
	return r.AskStream(ctx, s)
}
