package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func newSlotCommand() *cobra.Command {
	return newGroup("slot", "Show, create and drop the replication slot", help("slot"),
		newSlotShowCommand(), newSlotCreateCommand(), newSlotDropCommand())
}

func newSlotShowCommand() *cobra.Command {
	var asJSON bool
	cmd := slotCommand("show", "Show the slot", func(cmd *cobra.Command, cfg *Config, db *table.DB) error {
		slot, fresh, err := status.ReadSlots(cmd.Context(), db, cfg.Postgres.Slot)
		if err != nil {
			return err
		}
		if asJSON {
			return printIndented(cmd.OutOrStdout(), struct {
				Slot    *status.Slot `json:"slot"`
				NewSlot *status.Slot `json:"new_slot"`
			}{slot, fresh})
		}
		sheet{cmd.OutOrStdout()}.slots(slot, fresh, cfg.Postgres.MaxRetainedWAL)
		return nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	addConfigFlags(cmd)
	return cmd
}

func newSlotCreateCommand() *cobra.Command {
	var text string
	var wait time.Duration
	create := func(cmd *cobra.Command, cfg *Config, db *table.DB) error {
		return createSlot(cmd.Context(), cfg, db, wait, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	cmd := slotCommand("create", "Create the slot", create)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		err := (durationValue{p: &wait}).Set(text)
		if err == nil && wait <= 0 {
			err = fmt.Errorf("%s is no time to wait", text)
		}
		if err != nil {
			return &usageError{fmt.Errorf("--wait: %w", err)}
		}
		return nil
	}
	cmd.Flags().StringVar(&text, "wait", "1m", "how long to wait for others' transactions, as in 30s or 1h")
	addConfigFlags(cmd)
	return cmd
}

func newSlotDropCommand() *cobra.Command {
	cmd := slotCommand("drop", "Drop the slot", func(cmd *cobra.Command, cfg *Config, db *table.DB) error {
		return dropSlot(cmd.Context(), cfg, db, cmd.OutOrStdout())
	})
	addConfigFlags(cmd)
	return cmd
}

func slotCommand(use, short string, do func(*cobra.Command, *Config, *table.DB) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: help("slot " + use), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			db, err := openLook(cmd.Context(), cfg, "walpost slot")
			if err != nil {
				return err
			}
			defer db.Close()
			return do(cmd, cfg, db)
		},
	}
}

// lockPatience is how long the server may take to notice that the lock's holder has ended: a relay, or
// the command before.
const lockPatience = 2 * time.Second

// takeLock keeps relays away for as long as the connection lasts: none is at work, and none begins.
func takeLock(ctx context.Context, db *table.DB, advice string) error {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		ok, err := db.TryLock(ctx)
		if err != nil || ok {
			return err
		}
		if time.Since(begun) > lockPatience {
			break
		}
	}
	holder, err := db.LockHolder(ctx)
	if err != nil {
		return err
	}
	who := "somebody who has just ended"
	if holder != nil {
		who = sessionText(holder)
	}
	return hint.Errorf(advice, "a relay holds the lock of this slot: %s", who)
}

func createSlot(
	ctx context.Context, cfg *Config, db *table.DB, wait time.Duration, stdout, stderr io.Writer,
) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	if cfg.Mode == "poll" {
		return hint.Errorf("a relay that polls needs no slot, and would drop it: leave mode out, or the slot",
			"create slot %q: mode is poll", cfg.Postgres.Slot)
	}
	err = stream.CheckServer(ctx, db.Conn(), cfg.Postgres.Slot)
	if err != nil && !errors.Is(err, stream.ErrNoFreeSlot) { // it takes only one
		return err
	}
	if err := takeLock(ctx, db, "it makes its slot itself; `walpost slot show` shows it"); err != nil {
		return err
	}
	if err := refuseSlot(ctx, db, cfg.Postgres.Slot); err != nil {
		return err
	}
	if err := db.Limit(ctx, status.Look); err != nil {
		return err
	}
	err = stream.CheckPublication(ctx, db.Conn(), cfg.Postgres.Publication, tables)
	if errors.Is(err, stream.ErrNoPublication) {
		err = hint.Wrap(err, "run `walpost migrate up` as the tables' owner: "+
			"the publication must exist before the slot")
	}
	if err != nil {
		return err
	}
	if err := forgetSlot(ctx, db, cfg.Postgres.Slot); err != nil {
		return err
	}
	if err := makeSlot(ctx, cfg, db, wait, stderr); err != nil {
		return err
	}
	slot, err := status.ReadSlot(ctx, db, cfg.Postgres.Slot)
	if err != nil {
		return err
	}
	sheet{stdout}.slot("created", slot, cfg.Postgres.MaxRetainedWAL)
	return nil
}

func refuseSlot(ctx context.Context, db *table.DB, name string) error {
	slot, err := status.ReadSlot(ctx, db, name)
	if err == nil && slot.Exists {
		err = hint.Errorf("`walpost slot show` shows it; "+
			"a relay uses it, or recreates it, if a relay made it; "+
			"any other slot keeps a relay from starting",
			"slot %q exists", name)
	}
	return err
}

// makeSlot waits for every transaction that is running, and says for which.
func makeSlot(ctx context.Context, cfg *Config, db *table.DB, wait time.Duration, stderr io.Writer) error {
	slots, err := stream.OpenSlots(ctx, cfg.Postgres.server())
	if err != nil {
		return err
	}
	defer slots.Close()
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	made := make(chan error, 1)
	go func() { made <- slots.Create(limited, cfg.Postgres.Slot) }()
	blocker := ""
	for {
		select {
		case err := <-made:
			if err != nil && limited.Err() != nil && ctx.Err() == nil {
				return hint.Errorf("wait longer (--wait), or end what it waits for",
					"create slot %q: not within %s; it waited for %s",
					cfg.Postgres.Slot, formatDuration(wait), cmp.Or(blocker, "others' transactions"))
			}
			return err
		case <-time.After(time.Second):
		}
		who, err := db.BlockerOf(ctx, slots.PID())
		if err == nil && who != "" && who != blocker {
			blocker = who
			fmt.Fprintf(stderr, "waiting for %s\n", who)
		}
	}
}

// forgetSlot has a relay deliver first what an earlier slot of that name has not brought.
func forgetSlot(ctx context.Context, db *table.DB, name string) error {
	known, _, err := db.Sent(ctx, "SELECT")
	if err != nil {
		return err
	}
	known = slices.DeleteFunc(known, func(s table.Sent) bool { return s.Slot != name || s.PublishedAs == "" })
	if len(known) == 0 {
		return nil
	}
	for i := range known {
		known[i].PublishedAs = ""
	}
	return db.NotePublished(ctx, known)
}

func dropSlot(ctx context.Context, cfg *Config, db *table.DB, w io.Writer) error {
	const stop = "stop that relay first: one that runs would recreate the slot at once"
	if err := takeLock(ctx, db, stop); err != nil {
		return err
	}
	slot, err := status.ReadSlot(ctx, db, cfg.Postgres.Slot)
	if err != nil {
		return err
	}
	if !slot.Exists {
		_, err := fmt.Fprintf(w, "there is no slot %s\n", slot.Name)
		return err
	}
	if err := mayDrop(slot); err != nil {
		return err
	}
	if err := db.DropSlot(ctx, slot.Name); err != nil {
		return adviseDrop(err, db)
	}
	fmt.Fprintf(w, "dropped slot %s\n", slot.Name)
	fmt.Fprintln(w, "nothing is lost: the next relay makes another slot, "+
		"and the tables deliver what is pending")
	return nil
}

// mayDrop refuses a slot that is in use, or somebody else's.
func mayDrop(s *status.Slot) error {
	switch {
	case !s.Own:
		return hint.Errorf("check postgres.slot and the database in postgres.url; "+
			"whoever owns it drops it with SELECT pg_drop_replication_slot(...)",
			"slot %q is no relay's of this database: %s", s.Name, fmt.Sprint(slotTraits(s.SlotState)))
	case s.ActivePID != nil:
		who := fmt.Sprintf("process %d", *s.ActivePID)
		if s.Walsender != nil {
			who = sessionText(s.Walsender)
		}
		return hint.Errorf("end it first; after a relay that was cut off the server does so within seconds",
			"slot %q is in use by %s", s.Name, who)
	}
	return nil
}

func adviseDrop(err error, db *table.DB) error {
	switch pg.Code(err) {
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, fmt.Sprintf("run it as a role with REPLICATION: "+
			"ALTER ROLE %s REPLICATION (RDS: GRANT rds_replication TO %[1]s)", outbox.QuoteIdent(db.User())))
	case pgerrcode.ObjectInUse:
		return hint.Wrap(err, "something has begun to stream it: `walpost slot show` says which process")
	}
	return err
}
