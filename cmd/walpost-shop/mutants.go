package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// mutants are defects that are planted in package consume, one after the other. The shop has to notice each.
// That an earlier owner is fenced off is left to consume.TestStreamIsRolledBack: here the ids of handled
// events hide the lack.
var mutants = []struct {
	name  string
	edits []testenv.Edit
}{
	{"the offset is committed before the effect", []testenv.Edit{{
		"consume/partition.go", "	if len(todo) > 0 {\n", `	if err := c.finish(ctx, s); err != nil {
		return err
	}
	c.end()
	if c, err = p.begin(ctx, nil); err != nil {
		return err
	}
	s = step{offset: p.offset}
	if len(todo) > 0 {
`,
	}}},
	{"handled events are not recognized", []testenv.Edit{{
		"consume/partition.go", "if !c.seen[ids[i]] {", "{",
	}}},
}

// plantMutants runs the shop with each defect, up to three times, and fails where one is not noticed.
func plantMutants(ctx context.Context, o options, out io.Writer) (err error) {
	if o.walpost == "" {
		if o.walpost, err = testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost"); err != nil {
			return err
		}
	}
	for _, m := range mutants {
		files := map[string]string{}
		if err := testenv.Plant(ctx, files, m.edits...); err != nil {
			return fmt.Errorf("plant %q: %w", m.name, err)
		}
		program, err := testenv.BuildPatched(ctx, "github.com/walpost/walpost/cmd/walpost-shop", files)
		if err != nil {
			return fmt.Errorf("plant %q: %w", m.name, err)
		}
		if err := notice(ctx, o, program, m.name, out); err != nil {
			return err
		}
	}
	return nil
}

func notice(ctx context.Context, o options, program, name string, out io.Writer) error {
	for range 3 {
		cmd := exec.CommandContext(ctx, program, "-walpost", o.walpost,
			"-orders", fmt.Sprint(o.orders), "-clients", fmt.Sprint(o.clients), "-faults", o.faults.String())
		cmd.WaitDelay = time.Minute
		text, err := cmd.Output()
		lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
		last := lines[len(lines)-1]
		var ended *exec.ExitError
		switch {
		case errors.As(err, &ended) && ended.ExitCode() == exitFailed &&
			bytes.HasPrefix(last, []byte("walpost-shop: ")):
			fmt.Fprintf(out, "noticed: %s: %s\n", name, last)
			return nil
		case err != nil:
			return fmt.Errorf("run the shop with the defect %q: %w\n%s", name, err, text)
		}
	}
	return hint.Errorf("give it more orders, or faults in shorter intervals",
		"the shop does not notice a defect: %s", name)
}
