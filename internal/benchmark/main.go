// Command benchmark runs `walpost bench` on private servers of its own, and turns the
// results that are kept into tables and plots.
package main

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"syscall"

	"github.com/walpost/walpost/internal/testenv"
)

func main() { testenv.Command(run) }

func run(ctx context.Context) error {
	replicas := flag.Int("servers", 1, "NATS servers")
	always := flag.Bool("sync", false, "have NATS flush each write (sync_interval: always)")
	encrypted := flag.Bool("tls", false, "connect to PostgreSQL over TLS")
	summary := flag.String("summary", "", "run nothing: print the results of a folder as Markdown, and draw its plots")
	flag.Parse()
	if *summary != "" {
		return summarize(os.Stdout, *summary)
	}
	// As a server would have it: the defaults of the tests forgo durability.
	pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{FSync: true, TLS: *encrypted, Settings: map[string]string{
		"synchronous_commit": "on", "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min",
	}})
	if err != nil {
		return err
	}
	defer pg.Close()
	options := testenv.NATSOptions{Process: true, JetStream: "max_file_store: 64GB"}
	if *always {
		options.JetStream += "\nsync_interval: always"
	}
	var urls string
	if *replicas == 1 {
		n, err := testenv.StartNATS(ctx, options)
		if err != nil {
			return err
		}
		defer n.Close()
		urls = n.URL()
	} else {
		c, err := testenv.StartNATSCluster(ctx, *replicas, options)
		if err != nil {
			return err
		}
		defer c.Close()
		urls = c.Nodes[0].URL()
	}
	program, err := testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, append([]string{"bench", "--postgres-url", pg.URL("postgres"), "--nats-url", urls}, flag.Args()...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	return cmd.Run()
}
