package main

import (
	"io"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"go.uber.org/zap"
)

func newConfigCommand() *cobra.Command {
	return newGroup("config", "Check the configuration, or print an example of it",
		"The configuration: file, environment variables and flags.", newConfigCheckCommand(), newConfigExampleCommand())
}

func newConfigCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Validate the configuration and print what is in force",
		Long: `Reads the configuration as run would, reports everything that is wrong with it, and prints what is in force: every key with
its value, without secrets, and with the place that it came from. It connects to nothing and opens no other file.`,
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
			_, err = io.WriteString(cmd.OutOrStdout(), effectiveYAML(l))
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
