// Command walpost-demo shows the relay at work: a private PostgreSQL, an
// embedded NATS server, the relay between them, a small shop that writes orders,
// and a count of what arrived. Nothing of it stays behind.
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
	"github.com/walpost/walpost/internal/testenv"
)

// The exit codes, as those of walpost.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run()) }

// run executes the command line and returns the exit code. The first SIGINT or
// SIGTERM ends the load, and the summary follows; the second gives up on it.
func run() int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	code := make(chan int, 1)
	go func() { code <- execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr) }()
	for asked := false; ; asked = true {
		select {
		case c := <-code:
			return c
		case <-signals:
			if asked {
				_ = testenv.Cleanup()
				return exitFailed
			}
			cancel()
		}
	}
}

func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	o, err := parse(args, stdout)
	if errors.Is(err, errHelp) {
		return 0
	}
	if err != nil {
		printError(stderr, err)
		return exitUsage
	}
	s := newScreen(stdout, stderr)
	v, err := demo(ctx, o, s, stdin)
	s.clear()
	if err != nil {
		printError(stderr, err)
		return exitFailed
	}
	// The last line is a contract: programs read it.
	s.println(v.String())
	if !v.ok() {
		return exitFailed
	}
	return 0
}

func printError(w io.Writer, err error) {
	fmt.Fprintf(w, "error: %v\n", err)
	if h := hint.Of(err); h != "" {
		fmt.Fprintf(w, "hint: %s\n", h)
	}
}
