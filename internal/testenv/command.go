package testenv

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Command is the main function of a program that starts servers: it runs until SIGINT
// or SIGTERM ends ctx, cleans up, and exits with status 1 after an error.
func Command(run func(context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if cerr := Cleanup(); err == nil {
		err = cerr
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
