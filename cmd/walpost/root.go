package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/walpost/walpost/internal/hint"
)

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "walpost",
		Short:         "Relay a PostgreSQL outbox into NATS JetStream",
		Long:          help("walpost"),
		SilenceErrors: true, // execute prints them
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          showHelp,
		Version:       buildVersion().String(),
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(newInitCommand(), newRunCommand(), newMigrateCommand(), newDoctorCommand(),
		newStatusCommand(), newTailCommand(), newSlotCommand(), newOutboxCommand(), newDLQCommand(),
		newConsumersCommand(), newVerifyCommand(), newRetentionCommand(), newReplayCommand(),
		newCatalogCommand(), newDrillCommand(), newUICommand(), newBenchCommand(), newConfigCommand(),
		newDocsCommand(), newManCommand(), newVersionCommand())
	checkCobrasCommands(root)
	return root
}

// checkCobrasCommands has the commands that cobra adds refuse what they do not know, as the others do.
func checkCobrasCommands(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "help":
			c.Args = func(_ *cobra.Command, args []string) error {
				topic, rest, _ := root.Find(args) // of root, whose Args are set, it returns no error
				return noSuchCommand(topic, rest)
			}
		case "completion":
			c.Args, c.RunE = noSuchCommand, showHelp
			for _, shell := range c.Commands() {
				shell.Args = noArgs
			}
		}
	}
}

func flagError(cmd *cobra.Command, err error) error {
	advice := fmt.Sprintf("`%s --help` lists the flags", cmd.CommandPath())
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if h := didYouMean(unknown.GetSpecifiedName(), names); h != "" {
			advice = strings.Replace(h, "mean ", "mean --", 1)
		}
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = fmt.Errorf("--%s: %q is %s", invalid.GetFlag().Name, invalid.GetValue(), whatItIsNot(invalid))
	}
	return &usageError{hint.Wrap(err, advice)}
}

// whatItIsNot knows the types of the commands' own flags; those of the
// configuration take any text at first.
func whatItIsNot(invalid *pflag.InvalidValueError) string {
	switch {
	case invalid.GetFlag().Value.Type() == "bool":
		return "neither true nor false"
	case errors.Is(invalid, strconv.ErrRange):
		return "out of range"
	}
	return "not a whole number"
}

// newGroup is a command that only has subcommands.
func newGroup(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	group := &cobra.Command{Use: use, Short: short, Long: long, Args: noSuchCommand, RunE: showHelp}
	group.AddCommand(commands...)
	return group
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// noSuchCommand is called with what is left of the command line when no subcommand has taken it.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	advice := didYouMean(args[0], names)
	if advice == "" {
		advice = fmt.Sprintf("`%s --help` lists the commands", cmd.CommandPath())
	}
	return &usageError{hint.Errorf(advice, "unknown command %q", cmd.CommandPath()+" "+args[0])}
}

// oneArg takes one argument, no more and no less. The advice says how to find or to write one.
func oneArg(what, advice string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return nil
		}
		return &usageError{hint.Errorf(advice, "%s takes one %s, got %d", cmd.CommandPath(), what, len(args))}
	}
}

// atMostOneArg is oneArg for an argument that may be left out.
func atMostOneArg(what, advice string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return oneArg("or no "+what, advice)(cmd, args)
	}
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return &usageError{hint.Errorf(fmt.Sprintf("`%s --help` shows its usage", cmd.CommandPath()),
		"%s takes no argument, got %q", cmd.CommandPath(), args[0])}
}
