// Command measure prints as Markdown how large the project is, how its files depend on each other, how it is
// worded and, with -path, through how many functions a row passes. It measures the checkouts that are its
// arguments, the one it runs in by default; a cell shows a figure for each of them where these differ, in
// their order.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/walpost/walpost/internal/testenv"
)

func main() { testenv.Command(run) }

func run(ctx context.Context) error {
	path := flag.Bool("path", false, "run the relay, too, and count what a row passes; takes minutes")
	list := flag.Bool("list", false, "with -path: name these functions")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: go run ./internal/house/measure [-path [-list]] [checkout ...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	folders := flag.Args()
	if len(folders) == 0 {
		folders = []string{"."}
	}
	var all [][]table
	for _, folder := range folders {
		tables, err := measure(ctx, folder, *path, *list)
		if err != nil {
			return fmt.Errorf("measure %s: %w", folder, err)
		}
		all = append(all, tables)
	}
	for _, t := range merge(all) {
		t.print(os.Stdout)
	}
	return nil
}

func measure(ctx context.Context, folder string, path, list bool) ([]table, error) {
	c, err := load(ctx, folder)
	if err != nil {
		return nil, err
	}
	size, err := c.size()
	if err != nil {
		return nil, err
	}
	words, err := c.words()
	if err != nil {
		return nil, err
	}
	tables := []table{size, c.rooms(), c.largestTypes(), words}
	if !path {
		return tables, nil
	}
	passed, err := c.passed(ctx)
	if err != nil {
		return nil, err
	}
	if list {
		return append(tables, passed.summary(), passed.names()), nil
	}
	return append(tables, passed.summary()), nil
}
