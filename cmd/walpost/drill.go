package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/drill"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/verify"
)

func newDrillCommand() *cobra.Command {
	const short = "Break a staging system, and report what was lost and how long it took"
	return newGroup("drill", short, help("drill"),
		newSlotLostCommand(), newRelayKilledCommand(), newFailoverCommand(), newNATSRestartCommand())
}

// drillCommand is one of the drills: how the system is broken, and the flags that all of them have.
type drillCommand struct {
	fault             func() (drill.Fault, error)
	what              string // is done to the system
	rate              int
	duration, waiting string
	yes, json         bool
}

func newSlotLostCommand() *cobra.Command {
	c := &drillCommand{what: "End the walsender and drop the slot"}
	c.fault = func() (drill.Fault, error) { return drill.SlotLost{}, nil }
	return c.command("slot-lost", "Drop the slot under the relay")
}

func newRelayKilledCommand() *cobra.Command {
	c, fault := &drillCommand{what: "Kill the relay"}, drill.RelayKilled{}
	c.fault = func() (drill.Fault, error) {
		if (fault.Command == "") == (fault.PID == 0) {
			return nil, &usageError{hint.Errorf(
				"as in --pid 4711, or --kill 'kubectl delete pod --force walpost-0'",
				"which relay: give --pid or --kill")}
		}
		if fault.Command == "" && fault.PID <= 1 {
			return nil, &usageError{fmt.Errorf("--pid: %d is no relay", fault.PID)}
		}
		return fault, nil
	}
	cmd := c.command("relay-killed {--pid N | --kill COMMAND}",
		"Kill the relay; its supervisor starts it again")
	cmd.Flags().IntVar(&fault.PID, "pid", 0, "the relay's process on this machine")
	cmd.Flags().StringVar(&fault.Command, "kill", "", "a command (sh -c) that kills the relay")
	return cmd
}

func newFailoverCommand() *cobra.Command {
	c := &drillCommand{what: "Stop the primary for good and promote the standby"}
	fault := drill.Failover{}
	c.fault = func() (drill.Fault, error) {
		if fault.Standby == "" || fault.Stop == "" {
			return nil, &usageError{hint.Errorf("as in --standby postgres://postgres@db2/shop "+
				"--stop 'ssh db1 pg_ctl stop -m immediate'",
				"walpost drill failover needs --standby and --stop")}
		}
		return fault, nil
	}
	cmd := c.command("failover --standby URL --stop COMMAND", "Stop the primary and promote a standby")
	cmd.Flags().StringVar(&fault.Standby, "standby", "", "the standby, as a role that may promote it")
	cmd.Flags().StringVar(&fault.Stop, "stop", "", "a command (sh -c) that stops the primary, or cuts it off")
	return cmd
}

func newNATSRestartCommand() *cobra.Command {
	c, fault := &drillCommand{what: "Restart the NATS server"}, drill.NATSRestart{}
	c.fault = func() (drill.Fault, error) {
		if fault.Command == "" {
			return nil, &usageError{hint.Errorf("as in --restart 'systemctl restart nats'",
				"walpost drill nats-restart needs --restart")}
		}
		return fault, nil
	}
	cmd := c.command("nats-restart --restart COMMAND", "Restart the NATS server")
	cmd.Flags().StringVar(&fault.Command, "restart", "", "a command (sh -c) that restarts the NATS server")
	return cmd
}

func (c *drillCommand) command(use, short string) *cobra.Command {
	name, _, _ := strings.Cut(use, " ")
	cmd := &cobra.Command{Use: use, Short: short, Long: help("drill " + name), Args: noArgs, RunE: c.run}
	flags := cmd.Flags()
	flags.IntVar(&c.rate, "rate", 50, "events to write each second; 0 only watches the system's own")
	flags.StringVar(&c.duration, "for", "30s", "how long events are written, half of it before the fault")
	flags.StringVar(&c.waiting, "patience", "5m", "how long the fault, and then the recovery, may take")
	flags.BoolVar(&c.yes, "yes", false, "do not ask")
	flags.BoolVar(&c.json, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

func (c *drillCommand) run(cmd *cobra.Command, _ []string) error {
	fault, err := c.fault()
	if err != nil {
		return err
	}
	config := drill.Config{Fault: fault, Rate: c.rate}
	if c.rate < 0 || c.rate > drill.MostRate {
		return &usageError{fmt.Errorf("--rate: %d is not within 0 to %d", c.rate, drill.MostRate)}
	}
	if err := spanFlag(&config.For, "for", c.duration); err != nil {
		return err
	}
	if err := spanFlag(&config.Patience, "patience", c.waiting); err != nil {
		return err
	}
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	if err := c.configure(cmd, cfg, &config); err != nil {
		return err
	}
	s, _, closeNATS, err := openStream(cmd.Context(), cfg, "walpost drill")
	if err != nil {
		return err
	}
	defer closeNATS()
	config.Stream = s
	d, err := drill.Prepare(cmd.Context(), config)
	if errors.Is(err, drill.ErrNotAllowed) {
		err = &usageError{err}
	}
	if err != nil {
		return err
	}
	defer d.Close()
	if err := c.confirm(cmd, d); err != nil {
		return err
	}
	report, err := d.Run(cmd.Context())
	return tellDrill(cmd.OutOrStdout(), report, err, c.json)
}

// spanFlag reads a duration that is greater than 0.
func spanFlag(d *time.Duration, flag, text string) error {
	err := durationValue{p: d}.Set(text)
	if err == nil && *d <= 0 {
		err = fmt.Errorf("%s is no time to wait", text)
	}
	if err != nil {
		return &usageError{fmt.Errorf("--%s: %w", flag, err)}
	}
	return nil
}

func (c *drillCommand) configure(cmd *cobra.Command, cfg *Config, d *drill.Config) (err error) {
	d.Postgres = database(cfg, "walpost drill")
	d.DelayThreshold = cfg.Fallback.DelayThreshold
	if d.Outboxes, err = cfg.Tables(); err != nil {
		return err
	}
	if d.Source, _, _, err = identifySource(cmd.Context(), cfg, d.Postgres); err != nil {
		return err
	}
	d.Verify = func(_ context.Context, since time.Time) (*verify.Report, error) {
		return runVerify(cmd, cfg, since, false)
	}
	d.Alarms = func(ctx context.Context) (map[string]int64, error) { return readAlarms(ctx, cfg.HTTP.Listen) }
	begun := time.Now()
	d.Say = func(format string, args ...any) {
		text := oneLine(fmt.Sprintf(format, args...))
		fmt.Fprintf(cmd.ErrOrStderr(), "%6.1f s  %s\n", time.Since(begun).Seconds(), escape(text))
	}
	return nil
}

// confirm asks before anything is broken.
func (c *drillCommand) confirm(cmd *cobra.Command, d *drill.Drill) error {
	if c.yes {
		return nil
	}
	what := fmt.Sprintf("%s: database %s, slot %s, stream %s", c.what, d.Database(), d.Slot(), d.Stream())
	if _, terminal := terminalWidth(cmd.InOrStdin()); !terminal {
		return &usageError{hint.Errorf("add --yes",
			"%s: there is no terminal to ask on, and nothing was broken", what)}
	}
	if t := d.Outbox(); t != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "Events of type %s are written into %s, and reach its consumers.\n",
			drill.EventType, t)
	}
	if !confirmed(cmd, what+"?") {
		return errors.New("nothing was broken")
	}
	return nil
}

// tellDrill prints the report, also that of a drill that ended early.
func tellDrill(w io.Writer, r *drill.Report, broken error, asJSON bool) error {
	if err := printDrill(w, r, asJSON); err != nil {
		return errors.Join(broken, err)
	}
	switch {
	case broken != nil:
		return broken
	case r.OK:
		return nil
	case !r.Recovered:
		return errors.New("not everything was stored in time")
	}
	return fmt.Errorf("lost %d, duplicated %d, reordered %d, unknown %d",
		r.Lost, r.Duplicated, r.Reordered, r.Unknown)
}
