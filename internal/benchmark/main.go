// Command benchmark runs `walpost bench` on private servers of its own, and turns the
// results that are kept into tables and plots.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

func main() { testenv.Command(run) }

func run(ctx context.Context) error {
	var on servers
	flag.IntVar(&on.replicas, "servers", 1, "NATS servers")
	flag.BoolVar(&on.always, "sync", false, "have NATS flush each write (sync_interval: always)")
	flag.BoolVar(&on.tls, "tls", false, "connect to PostgreSQL over TLS")
	keep := flag.String("keep", "", "measure what docs/BENCHMARKS.md shows, and keep it in a folder")
	only := flag.String("cases", "",
		"with -keep: the names of what is measured, such as tx100,tx1; empty is all")
	scale := flag.Bool("scale", false, "with -keep: measure what docs/SCALE.md shows")
	summary := flag.String("summary", "",
		"run nothing: print the results of a folder as Markdown, and draw its plots")
	flag.Parse()
	if *summary != "" {
		return summarize(os.Stdout, *summary)
	}
	program, err := testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost")
	if err != nil {
		return err
	}
	if *keep == "" {
		return on.bench(ctx, program, flag.Args(), os.Stdout)
	}
	if *scale {
		return errors.Join(measureSources(ctx, *keep), measureFleets(ctx, program, *keep))
	}
	names := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	for _, name := range names {
		if !slices.ContainsFunc(cases, func(c measured) bool { return c.name == name }) {
			return fmt.Errorf("-cases: there is no %q", name)
		}
	}
	for _, c := range cases {
		if len(names) > 0 && !slices.Contains(names, c.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", c.name, c.title)
		if err := c.measure(ctx, program, *keep); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (c measured) measure(ctx context.Context, program, folder string) error {
	var out bytes.Buffer
	if err := c.bench(ctx, program, slices.Concat(nothing, []string{"--json"}, c.args), &out); err != nil {
		return err
	}
	k := kept{Title: c.title}
	if err := json.Unmarshal(out.Bytes(), &k.Report); err != nil {
		return err
	}
	text, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, c.name+".json"), append(text, '\n'), 0o644)
}

// bench runs walpost bench.
func (on servers) bench(ctx context.Context, program string, args []string, out io.Writer) (err error) {
	// As a server would have it: the defaults of the tests forgo durability.
	settings := map[string]string{
		"synchronous_commit": "on", "shared_buffers": "512MB",
		"max_wal_size": "8GB", "checkpoint_timeout": "30min",
	}
	pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{FSync: true, TLS: on.tls, Settings: settings})
	if err != nil {
		return err
	}
	defer pg.Close()
	options := testenv.NATSOptions{Process: true, JetStream: "max_file_store: 64GB"}
	if on.always {
		options.JetStream += "\nsync_interval: always"
	}
	var urls string
	if on.replicas > 1 {
		c, err := testenv.StartNATSCluster(ctx, on.replicas, options)
		if err != nil {
			return err
		}
		defer c.Close()
		urls = c.Nodes[0].URL()
		if err := awaitLeader(ctx, urls); err != nil {
			return err
		}
	} else {
		n, err := testenv.StartNATS(ctx, options)
		if err != nil {
			return err
		}
		defer n.Close()
		urls = n.URL()
	}
	subcommand := []string{"bench", "--postgres-url", pg.URL("postgres"), "--nats-url", urls}
	cmd := exec.CommandContext(ctx, program, append(subcommand, args...)...)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	return cmd.Run()
}

// awaitLeader waits until a cluster answers for JetStream.
func awaitLeader(ctx context.Context, url string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	for range 30 {
		once, cancel := context.WithTimeout(ctx, 2*time.Second)
		_, err = js.AccountInfo(once)
		cancel()
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return fmt.Errorf("the NATS cluster has no leader: %w", err)
}
