package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/pg"
)

func newConfigCommand() *cobra.Command {
	return newGroup("config", "Check the configuration, print an example of it, list its flags (help config)",
		configHelp+configFlags(), newConfigCheckCommand(), newConfigExampleCommand())
}

const configHelp = `The configuration: file, environment variables and flags. Every command that reads it takes --config FILE and the flags below, each
with its key in the file and its environment variable. A flag goes before a variable, a variable before the file. A password in
a flag can be read by every user of the machine: keep it in the environment, in a file or in ~/.pgpass.

`

func configFlags() string {
	var cmd cobra.Command
	addConfigFlags(&cmd)
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = f.Name == "config" })
	return strings.TrimRight(cmd.Flags().FlagUsages(), "\n")
}

func newConfigCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Validate the configuration and print what is in force",
		Long: `Reads the configuration as run would, reports everything that is wrong with it, and prints what is in force: every key with
its value, without secrets, and with the place that it came from. It connects to nothing. Of the files that the configuration
names it reads postgres.url_file and postgres.password_file only.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := load(cmd.Flags())
			if err != nil {
				return err
			}
			l.warn(cmd.ErrOrStderr())
			if _, err := newRelay(l.cfg, zap.NewNop(), prometheus.NewRegistry(), nil); err != nil {
				return err
			}
			if _, err := pg.Parse(l.cfg.Postgres.server()); err != nil {
				return &usageError{err}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "# valid; %s\n\n%s", l.source(), effectiveYAML(l))
			return err
		},
	}
	addConfigFlags(cmd)
	return cmd
}

func newConfigExampleCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "example",
		Short: "Print a configuration file with every key, its meaning and its default",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), exampleYAML())
			return err
		},
	}
}
