package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/walpost/walpost/internal/hint"
)

const usage = `walpost-demo shows walpost at work, on servers of its own:

  - a private PostgreSQL cluster in a temporary directory, with fsync on
  - a NATS server with JetStream, embedded in this process
  - the relay, with the defaults of ` + "`walpost run`" + `
  - a shop, whose writers commit orders together with their events, and sometimes
    roll them back

At the end it reads the whole stream from its beginning, compares it with the
outbox table, row by row, and removes everything it made. Ctrl-C ends the load
early; the summary follows. The last line is for programs:

  walpost-demo: committed=N stored=N lost=0 duplicated=0 reordered=0 p50=... p99=...

p50 and p99 are from the commit to JetStream's acknowledgement, over every event.
Exit codes: 0 everything arrived once and in order, 1 it did not, or something
failed, 2 wrong usage.

Flags:

  --duration D   how long the shop writes (default 10s)
  --rate N       how many transactions it commits per second (default 1000)
  --keep         keep everything running after the summary, until Ctrl-C: prints
                 the URLs, how to insert an event, and each event that arrives

PostgreSQL's programs are looked for in $WALPOST_PG_BIN, along $PATH and where
distributions put them. NO_COLOR=1 turns colours off.
`

// options are the flags.
type options struct {
	duration time.Duration
	rate     int // commits per second
	keep     bool
}

var errHelp = errors.New("help was asked for")

const maxRate = 100_000

func parse(args []string, stdout io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("walpost-demo", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.DurationVar(&o.duration, "duration", 10*time.Second, "")
	f.IntVar(&o.rate, "rate", 1000, "")
	f.BoolVar(&o.keep, "keep", false, "")
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, usage)
		return o, errHelp
	case err != nil:
	case f.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.duration <= 0:
		err = fmt.Errorf("--duration %s: want more than 0, as in 10s", o.duration)
	case o.rate < 1 || o.rate > maxRate:
		err = fmt.Errorf("--rate %d: want 1 to %d commits per second", o.rate, maxRate)
	}
	return o, hint.Wrap(err, "walpost-demo --help lists the flags")
}
