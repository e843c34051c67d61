// Command walpost relays a PostgreSQL transactional outbox into NATS JetStream.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/walpost/walpost/internal/hint"
)

// The exit codes are a contract with the programs that supervise this one.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run()) }

// run executes the command line and returns the exit code. The first SIGINT or SIGTERM cancels the command,
// which then drains; the second gives up on draining.
func run() int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	code := make(chan int, 1)
	go func() { code <- execute(ctx, os.Args[1:], os.Stdout, os.Stderr) }()
	for asked := false; ; asked = true {
		select {
		case c := <-code:
			return c
		case <-signals:
			if asked {
				return exitFailed
			}
			cancel()
		}
	}
}

func execute(ctx context.Context, args []string, out, errs io.Writer) int {
	stdout, stderr := &screen{w: out}, &screen{w: errs}
	defer stdout.flush()
	defer stderr.flush()
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var silent *silentError
	if !errors.As(err, &silent) {
		printError(stderr, err)
	}
	var usage *usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailed
}

// usageError is a mistake in the command line or in the configuration.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

// silentError ends a command with exit code 1 whose output has said everything.
type silentError struct{ error }

// printError writes one "error:" line, and a "hint:" line where there is one, for each of the errors that
// were joined.
func printError(w io.Writer, err error) {
	var all problems
	if errors.As(err, &all) {
		for _, e := range all {
			printError(w, e)
		}
		return
	}
	fmt.Fprintf(w, "error: %s\n", oneLine(err.Error()))
	if h := hint.Of(err); h != "" {
		fmt.Fprintf(w, "hint: %s\n", oneLine(h))
	}
}

// oneLine is [hint.OneLine].
func oneLine(s string) string { return hint.OneLine(s) }

// problems is everything that is wrong at once, so that it can be put right at once.
type problems []error

func (p problems) Error() string   { return errors.Join(p...).Error() }
func (p problems) Unwrap() []error { return p }
