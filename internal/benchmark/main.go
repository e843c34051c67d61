// Command benchmark runs `walpost bench` on private servers of its own.
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
	flag.Parse()
	// As a server would have it: the defaults of the tests forgo durability.
	pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{Settings: map[string]string{
		"fsync": "on", "synchronous_commit": "on", "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min",
	}})
	if err != nil {
		return err
	}
	defer pg.Close()
	var urls string
	if *replicas == 1 {
		n, err := testenv.StartNATS(ctx, testenv.NATSOptions{Process: true})
		if err != nil {
			return err
		}
		defer n.Close()
		urls = n.URL()
	} else {
		c, err := testenv.StartNATSCluster(ctx, *replicas, testenv.NATSOptions{Process: true})
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
