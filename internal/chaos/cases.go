package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/verify"
)

// findCase finds a case by its name.
func findCase(name string) (*possible, error) {
	var names []string
	for i := range possibles {
		if possibles[i].name == name {
			return &possibles[i], nil
		}
		names = append(names, possibles[i].name)
	}
	return nil, fmt.Errorf("-case %s: there are %s", name, strings.Join(names, ", "))
}

// possible is a case in which walpost does not promise that nothing is lost: what
// it stands on has broken its word.
type possible struct {
	name, what string
	world      func(*plan)
	play       func(context.Context, *world, *load) error
	// repaired is set where `walpost verify --repair` brings everything back.
	repaired bool
}

var possibles = []possible{
	{
		name:  "store-empty",
		what:  "R1 with the default sync_interval: a power failure, after which the store is empty",
		world: func(p *plan) { oneServer(p); p.rollback, p.emptied = true, true },
		play:  emptyStore, repaired: true,
	},
	{
		name: "failover",
		what: "failover to a standby that lacks the last transactions, " +
			"the walsender not held back by synchronized_standby_slots",
		world: func(p *plan) { oneServer(p); p.standby = true },
		play:  failOver,
	},
}

// emptyStore: what was acknowledged had not reached the disk yet.
func emptyStore(ctx context.Context, w *world, l *load) error {
	n := w.brokers[0]
	if err := n.Kill(); err != nil {
		return err
	}
	if err := n.RestoreStore(w.emptied()); err != nil {
		return err
	}
	return n.Start(ctx)
}

// failOver lets the standby fall behind, and the primary crash.
func failOver(ctx context.Context, w *world, l *load) error {
	if w.version.Major >= 17 {
		if err := w.primary.Reload(ctx, map[string]string{"synchronized_standby_slots": ""}); err != nil {
			return err
		}
		w.heldBack = false
	}
	return promoteBehind(ctx, w, time.Second)
}

func (w *world) emptied() string { return filepath.Join(w.dir, "emptied") }

// keepEmptyStore copies the store while it holds the stream and no message.
func (w *world) keepEmptyStore(ctx context.Context) error {
	n := w.brokers[0]
	if err := n.Stop(ctx); err != nil {
		return err
	}
	if err := n.SnapshotStore(w.emptied()); err != nil {
		return err
	}
	return n.Start(ctx)
}

// playCase makes one of the possible losses happen, and counts before and after it
// is repaired.
func (w *world) playCase(ctx context.Context, c *possible, o *options, r *result) error {
	if err := w.exec(ctx, schemaSQL); err != nil {
		return err
	}
	writing, stop := context.WithCancel(ctx)
	defer stop()
	l := w.startLoad(writing, r.Seed, o.rows)
	sleep.For(ctx, 5*time.Second)
	r.Faults[c.name]++
	if err := c.play(ctx, w, l); err != nil {
		return err
	}
	l.finish()
	var err error
	if r.Pending, err = w.settled(ctx); err != nil {
		return err
	}
	if err := w.check(ctx, r); err != nil {
		return err
	}
	r.LostBefore = r.Lost
	if r.LostBefore+r.Phantoms == 0 {
		return errors.New("nothing was lost: the case did not happen")
	}
	if !c.repaired {
		return nil
	}
	found, err := w.verify(ctx, "--repair")
	if err != nil {
		return err
	}
	if n := found.Found[verify.Missing].Count; int(n) != r.Lost {
		return fmt.Errorf("verify has found %d missing rows, there are %d", n, r.Lost)
	}
	if r.Pending, err = w.settled(ctx); err != nil {
		return err
	}
	return w.check(ctx, r)
}

// verify runs `walpost verify`.
func (w *world) verify(ctx context.Context, args ...string) (*verify.Report, error) {
	cmd := exec.CommandContext(ctx, w.program, append([]string{"verify", "--json"}, args...)...)
	cmd.Dir, cmd.Env = w.dir, w.env
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 && len(out) > 0 {
		err = nil // something was found
	}
	if err != nil {
		if exit != nil {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("walpost verify: %w", err)
	}
	report := new(verify.Report)
	if err := json.Unmarshal(out, report); err != nil {
		return nil, fmt.Errorf("walpost verify: %w", err)
	}
	if report.Incomplete {
		return nil, fmt.Errorf("walpost verify: %s", exit.Stderr)
	}
	return report, nil
}

// agree has `walpost verify` find what the rig's own reading has found.
func (w *world) agree(ctx context.Context, r *result) error {
	report, err := w.verify(ctx)
	if err != nil {
		return err
	}
	found := func(kinds ...verify.Kind) (n int) {
		for _, k := range kinds {
			n += int(report.Found[k].Count)
		}
		return n
	}
	all := []struct {
		what      string
		want, got int
	}{
		{"missing", r.Lost, found(verify.Missing)},
		{"duplicated", r.Duplicated, found(verify.Duplicated)},
		{"reordered", r.Reordered, found(verify.Reordered)},
		// Rows that were truncated away are not in the tables that it looks at.
		{"unknown or phantom", r.Unknown + r.Phantoms, found(verify.Unknown, verify.Phantom)},
	}
	for _, x := range all {
		excused := x.what == "unknown or phantom" && r.Faults["ids reused"] > 0 ||
			x.what != "missing" && r.Faults[anotherWriter] > 0
		if x.got != x.want && !excused {
			return fmt.Errorf("walpost verify has found %d %s, the rig %d", x.got, x.what, x.want)
		}
	}
	return nil
}
