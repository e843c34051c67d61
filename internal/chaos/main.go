// Command chaos breaks everything that walpost stands on, again and again, under a
// load, and counts afterwards what was lost, duplicated or reordered.
//
// Each run has a seed, which decides about its servers, its load, its faults and
// their order; what the machine makes of the timing is new each time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

func main() { testenv.Command(run) }

type options struct {
	seeds  string
	runs   int
	rows   int
	faults int

	parallel int

	of      string
	only    string
	batch   string
	mark    string
	results string
	keep    string
	mutants string
	last    time.Duration
	summary bool
	verbose bool

	mutant   *mutant
	possible *possible
	patience time.Duration
}

func run(ctx context.Context) error {
	var o options
	flag.StringVar(&o.seeds, "seeds", "", "comma-separated seeds, one for each run; default: new ones")
	flag.IntVar(&o.runs, "runs", 1, "number of runs, where no seeds are given")
	flag.IntVar(&o.rows, "rows", 25_000, "least number of events in a run")
	flag.IntVar(&o.faults, "faults", 12, "least number of faults in a run")
	flag.IntVar(&o.parallel, "parallel", 1, "number of runs side by side")
	flag.StringVar(&o.only, "only", "",
		"comma-separated faults; default: all that the run's servers can have")
	flag.StringVar(&o.batch, "batch", "",
		"single, fast or atomic: the relays' publish.batch; default: one that the seed draws")
	flag.StringVar(&o.mark, "mark", "", "update or journal: the relays' outboxes[].mark; default: update")
	flag.StringVar(&o.results, "results", "", "file that each run's result is added to, as a line of JSON")
	flag.StringVar(&o.keep, "logs", "", "folder for the relays' logs of runs that failed")
	flag.DurationVar(&o.last, "for", 0, "begin new runs for so long, where no seeds are given")
	flag.StringVar(&o.mutants, "mutants", "", "plant the known defects in the relay, one after the other, "+
		"and see each noticed: all, or those that begin so")
	flag.StringVar(&o.of, "case", "",
		"make a loss happen that walpost cannot prevent: store-empty or failover")
	flag.BoolVar(&o.summary, "summary", false,
		"run nothing, and print the tables of the results file as Markdown")
	flag.BoolVar(&o.verbose, "v", false, "say what is broken, as it is")
	flag.Parse()
	if o.parallel < 1 || o.runs < 1 {
		return errors.New("-parallel and -runs are 1 or more")
	}
	if o.batch != "" && !slices.Contains(batches, o.batch) {
		return fmt.Errorf("-batch %s: want one of %s", o.batch, strings.Join(batches, ", "))
	}
	if o.mark != "" && !slices.Contains(marks, o.mark) {
		return fmt.Errorf("-mark %s: want one of %s", o.mark, strings.Join(marks, ", "))
	}
	if o.summary {
		return printSummary(os.Stdout, o.results)
	}
	o.patience = patience
	if o.mutants != "" {
		return killMutants(ctx, &o)
	}
	if o.of != "" {
		var err error
		if o.possible, err = findCase(o.of); err != nil {
			return err
		}
	}
	seeds, err := o.plan()
	if err != nil {
		return err
	}
	next := make(chan uint64)
	go func() {
		defer close(next)
		for seed := range seeds {
			select {
			case next <- seed:
			case <-ctx.Done():
				return
			}
		}
	}()
	failed := 0
	err = o.side(func(mu *sync.Mutex) error {
		for seed := range next {
			r := runSeed(ctx, &o, seed)
			if ctx.Err() != nil {
				break // it was broken off
			}
			mu.Lock()
			fmt.Println(r)
			if !r.ok() {
				failed++
				fmt.Println("failed:", r.why()) // again, after the logs
				fmt.Println("again:", o.again(seed))
			}
			err := r.save(o.results)
			mu.Unlock()
			if err != nil {
				return err
			}
		}
		return ctx.Err()
	})
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d runs failed", failed)
	}
	return err
}

// again is the command that repeats a run.
func (o *options) again(seed uint64) string {
	s := fmt.Sprintf("go run ./internal/chaos -v -rows %d -faults %d -seeds %d", o.rows, o.faults, seed)
	if o.of != "" {
		s += " -case " + o.of
	}
	if o.only != "" {
		s += fmt.Sprintf(" -only %q", o.only)
	}
	if o.batch != "" {
		s += " -batch " + o.batch
	}
	if o.mark != "" {
		s += " -mark " + o.mark
	}
	return s
}

// side has several do the same side by side.
func (o *options) side(do func(*sync.Mutex) error) error {
	var all sync.WaitGroup
	var mu sync.Mutex
	errs := make([]error, o.parallel)
	for i := range errs {
		all.Go(func() { errs[i] = do(&mu) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// plan yields the seeds.
func (o *options) plan() (func(func(uint64) bool), error) {
	var given []uint64
	for _, s := range strings.Split(o.seeds, ",") {
		if s == "" {
			continue
		}
		n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("-seeds: %w", err)
		}
		given = append(given, n)
	}
	begun := time.Now()
	more := func(n int) bool {
		if o.last != 0 {
			return time.Since(begun) < o.last
		}
		return n < o.runs
	}
	return func(yield func(uint64) bool) {
		for _, s := range given {
			if !yield(s) {
				return
			}
		}
		for n := 0; len(given) == 0 && more(n); n++ {
			if !yield(rand.Uint64() >> 12) { // short enough to be typed
				return
			}
		}
	}, nil
}
