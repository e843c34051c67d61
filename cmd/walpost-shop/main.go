// Command walpost-shop runs examples/shop on private servers, breaks things while it works, and counts what
// happened. Nothing of it stays behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// The exit codes, as those of walpost.
const (
	exitFailed = 1
	exitUsage  = 2
)

// options are the flags.
type options struct {
	orders  int
	clients int
	faults  time.Duration
	walpost string
	logs    string
	mutants bool
}

func main() {
	if len(os.Args) > 1 && parts[os.Args[1]] != nil {
		os.Exit(runPart(os.Args[1]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err := testenv.Cleanup(); err != nil && code == 0 {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		code = exitFailed
	}
	os.Exit(code)
}

func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("walpost-shop", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.orders, "orders", 2000, "how many orders clients place")
	flags.IntVar(&o.clients, "clients", 8, "how many clients place orders at the same time")
	flags.DurationVar(&o.faults, "faults", 500*time.Millisecond,
		"the time from one fault to the next, on average; 0 is none")
	flags.StringVar(&o.walpost, "walpost", "", "the walpost program (default: it is built)")
	flags.StringVar(&o.logs, "logs", "", "a directory that keeps the logs of the shop's processes")
	flags.BoolVar(&o.mutants, "mutants", false,
		"plant known defects in package consume, and see each noticed")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	case flags.NArg() > 0 || o.orders < 1 || o.clients < 1 || o.faults < 0:
		fmt.Fprintln(stderr, "error: want flags only, and positive numbers\nhint: walpost-shop --help")
		return exitUsage
	}
	if o.mutants {
		return exitCode(plantMutants(ctx, o, stdout), stderr)
	}
	v, err := run(ctx, o, stdout)
	if err != nil {
		return exitCode(err, stderr)
	}
	// The last line is a contract: programs read it.
	fmt.Fprintln(stdout, v)
	if !v.ok() {
		return exitFailed
	}
	return 0
}

func exitCode(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "error: %v\n", err)
	if h := hint.Of(err); h != "" {
		fmt.Fprintf(stderr, "hint: %s\n", h)
	}
	return exitFailed
}
