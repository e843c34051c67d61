package testenv

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// NATSCluster is a JetStream cluster, for streams with replicas.
type NATSCluster struct {
	// Nodes may be stopped and started one by one.
	Nodes []*NATS
	// routes are the nodes' ports among themselves.
	routes []int
}

// StartNATSCluster starts n servers. It waits until they have elected a metadata
// leader that knows them all, unless they are processes: then the first requests
// may have to be made again.
func StartNATSCluster(ctx context.Context, n int, opts NATSOptions) (*NATSCluster, error) {
	c := new(NATSCluster)
	if err := c.start(ctx, n, opts); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *NATSCluster) start(ctx context.Context, n int, opts NATSOptions) (err error) {
	for range n {
		node, err := newNATS()
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, node)
		route, err := takePort()
		if err != nil {
			return err
		}
		c.routes = append(c.routes, route)
	}
	for i, node := range c.Nodes {
		if opts.Process {
			if node.command, err = Build(ctx, natsProgram); err != nil {
				return err
			}
		}
		if err := node.configure(opts, c.block(i)); err != nil {
			return err
		}
		if err := node.Start(ctx); err != nil {
			return err
		}
	}
	if opts.Process {
		return nil
	}
	return c.waitLeader(ctx)
}

func (c *NATSCluster) block(i int) string {
	var routes []string
	for _, port := range c.routes {
		routes = append(routes, "nats://"+loopback(port))
	}
	return fmt.Sprintf("cluster { name: testenv, listen: %q, routes: [ %s ], no_advertise: true }",
		loopback(c.routes[i]), strings.Join(routes, ", "))
}

func (c *NATSCluster) waitLeader(ctx context.Context) error {
	for !c.hasLeader() {
		if !sleep.For(ctx, 5*time.Millisecond) {
			return fmt.Errorf("wait for JetStream leader: %w\n%s", ctx.Err(), c.Log())
		}
	}
	return nil
}

func (c *NATSCluster) hasLeader() bool {
	for _, node := range c.Nodes {
		if s := node.Server(); s != nil && s.JetStreamIsLeader() {
			return len(s.JetStreamClusterPeers()) == len(c.Nodes)
		}
	}
	return false
}

// URL names all nodes, separated by commas.
func (c *NATSCluster) URL() string {
	var urls []string
	for _, node := range c.Nodes {
		urls = append(urls, node.URL())
	}
	return strings.Join(urls, ",")
}

// Log is the end of every node's log.
func (c *NATSCluster) Log() string {
	var b strings.Builder
	for _, node := range c.Nodes {
		fmt.Fprintf(&b, "--- %s\n%s", node.URL(), node.Log())
	}
	return b.String()
}

// Close ends all nodes and removes everything they wrote.
func (c *NATSCluster) Close() error {
	var errs []error
	for _, node := range c.Nodes {
		errs = append(errs, node.Close())
	}
	for _, port := range c.routes {
		freePort(port)
	}
	return errors.Join(errs...)
}
