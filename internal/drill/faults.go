package drill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// SlotLost ends the walsender and drops the slot.
type SlotLost struct{}

// Name is the command's.
func (SlotLost) Name() string { return "slot-lost" }

// Check refuses where the slot is somebody else's.
func (SlotLost) Check(_ context.Context, d *Drill) error {
	switch {
	case !d.streams():
		return hint.Errorf("`walpost status` shows the mode, and `walpost doctor` why",
			"drop the slot: the relay polls, and has none")
	case !d.slot.Own:
		return hint.Errorf("check postgres.slot",
			"drop the slot: %q is no relay's of this database", d.slot.Name)
	}
	return nil
}

// Inject drops the slot before the relay streams it again.
func (SlotLost) Inject(ctx context.Context, d *Drill) error {
	for {
		err := d.query(ctx, func(db *table.DB) error { return dropSlot(ctx, d, db) })
		if err == nil {
			d.step("dropped slot %s", d.slot.Name)
			return nil
		}
		again := pg.Code(err) == pgerrcode.ObjectInUse || errors.Is(err, errStreamed)
		if !again || !sleep.For(ctx, 10*time.Millisecond) {
			return adviseSlot(err, d.db.User())
		}
	}
}

var errStreamed = errors.New("the slot is being streamed")

// dropSlot ends the walsender and drops the slot in one look: a relay is back within milliseconds.
func dropSlot(ctx context.Context, d *Drill, db *table.DB) error {
	slot, err := db.ReadSlot(ctx, d.slot.Name)
	if err != nil || slot == nil {
		return err // somebody else was faster
	}
	if slot.ActivePID != nil {
		var ended bool
		err := db.QueryRow(ctx, []any{&ended}, `SELECT pg_terminate_backend($1)`, int32(*slot.ActivePID))
		if err != nil {
			return fmt.Errorf("end the walsender: %w", err)
		}
		d.step("ended the walsender, process %d", *slot.ActivePID)
		for range 100 {
			if slot, err = db.ReadSlot(ctx, d.slot.Name); err != nil || slot == nil || slot.ActivePID == nil {
				break
			}
			if !sleep.For(ctx, 2*time.Millisecond) {
				return ctx.Err()
			}
		}
		if err != nil || slot == nil {
			return err
		}
		if slot.ActivePID != nil {
			return errStreamed
		}
	}
	return db.DropSlot(ctx, d.slot.Name)
}

func adviseSlot(err error, user string) error {
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		return hint.Wrap(err, fmt.Sprintf("run it as the relay's role, or one with REPLICATION: "+
			"ALTER ROLE %s REPLICATION, and GRANT pg_signal_backend TO %[1]s", outbox.QuoteIdent(user)))
	}
	return err
}

// RelayKilled ends the relay. Its supervisor, or a relay that stands by, goes on.
type RelayKilled struct {
	Command string // for sh -c
	PID     int    // of a process on this machine, where Command is empty
}

// Name is the command's.
func (RelayKilled) Name() string { return "relay-killed" }

// Check sees that the process is there.
func (k RelayKilled) Check(context.Context, *Drill) error {
	if k.Command != "" || runtime.GOOS == "windows" {
		return nil
	}
	p, err := os.FindProcess(k.PID)
	if err == nil {
		err = p.Signal(syscall.Signal(0))
	}
	if err != nil {
		return hint.Errorf("name the relay's process, such as --pid \"$(pgrep -fx '[^ ]*walpost run.*')\"; "+
			"--kill runs a command, for a relay of another machine", "kill process %d: %w", k.PID, err)
	}
	return nil
}

// Inject waits until the relay's session has ended: else another process was killed.
func (k RelayKilled) Inject(ctx context.Context, d *Drill) error {
	if k.Command != "" {
		if err := d.shell(ctx, "kill", k.Command); err != nil {
			return err
		}
	} else {
		p, err := os.FindProcess(k.PID)
		if err == nil {
			err = p.Kill()
		}
		if err != nil {
			return fmt.Errorf("kill process %d: %w", k.PID, err)
		}
		d.step("killed process %d", k.PID)
	}
	for {
		holds := true
		err := d.query(ctx, func(db *table.DB) error {
			holder, err := db.LockHolder(ctx)
			holds = holder != nil && holder.PID == d.relay.PID
			return err
		})
		if err == nil && !holds {
			d.step("the relay's session with PostgreSQL has ended")
			return nil
		}
		if !sleep.For(ctx, 50*time.Millisecond) {
			return errors.New("the relay that held the lock still holds it: another process was killed")
		}
	}
}

// NATSRestart restarts the NATS server.
type NATSRestart struct{ Command string }

// Name is the command's.
func (NATSRestart) Name() string { return "nats-restart" }

// Check has nothing to look at.
func (NATSRestart) Check(context.Context, *Drill) error { return nil }

// Inject runs the command.
func (n NATSRestart) Inject(ctx context.Context, d *Drill) error {
	return d.shell(ctx, "restart", n.Command)
}

// shell runs a command of the operator's.
func (d *Drill) shell(ctx context.Context, flag, command string) error {
	d.step("began --%s: %s", flag, command)
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.WaitDelay = time.Second // a server that it starts may keep its output open
	out, err := cmd.CombinedOutput()
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		text := strings.TrimSpace(string(out[max(0, len(out)-500):]))
		return fmt.Errorf("run --%s: %w: %s", flag, err, text)
	}
	d.step("--%s has ended", flag)
	return nil
}
