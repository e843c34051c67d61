package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/examples/shop"
)

// The environment of a part of the shop, which is a process.
const (
	envPostgres = "SHOP_POSTGRES_URL"
	envNATS     = "SHOP_NATS_URL"
	envListen   = "SHOP_LISTEN"   // of the service
	envProvider = "SHOP_PROVIDER" // of the payment consumer
)

// parts are the programs of the shop. The conductor starts a process for each.
var parts = map[string]func(ctx context.Context, pool *pgxpool.Pool) error{
	"service": func(ctx context.Context, pool *pgxpool.Pool) error {
		return serve(ctx, os.Getenv(envListen), shop.Service(pool))
	},
	"read-model": consumer(4, shop.ReadModel),
	"audit":      consumer(4, shop.Audit),
	"payment": consumer(16, func(ctx context.Context, cfg consume.Config) error {
		return shop.Payment(ctx, cfg, os.Getenv(envProvider))
	}),
}

func runPart(name string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg, err := pgxpool.ParseConfig(os.Getenv(envPostgres))
	var pool *pgxpool.Pool
	if err == nil {
		cfg.MaxConns = 16
		pool, err = pgxpool.NewWithConfig(ctx, cfg)
	}
	if err == nil {
		defer pool.Close()
		err = parts[name](ctx, pool)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		return exitFailed
	}
	return 0
}

func serve(ctx context.Context, address string, h http.Handler) error {
	s := &http.Server{Addr: address, Handler: h, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = s.Shutdown(ctx)
	})
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// consumer makes a part of a consumer that handles so many events, or batches, at the same time.
func consumer(
	partitions int, run func(context.Context, consume.Config) error,
) func(context.Context, *pgxpool.Pool) error {
	return func(ctx context.Context, pool *pgxpool.Pool) error {
		nc, err := nats.Connect(os.Getenv(envNATS), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true),
			nats.ReconnectWait(100*time.Millisecond))
		if err != nil {
			return fmt.Errorf("connect to NATS: %w", err)
		}
		defer nc.Close()
		return run(ctx, consume.Config{
			Pool: pool, NATS: nc, Start: "all", Partitions: partitions,
			MaxAttempts: 1000, Backoff: 100 * time.Millisecond,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		})
	}
}
