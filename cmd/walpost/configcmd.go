package main

import (
	"errors"
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
		help("config")+"\n\n"+configFlags(), newConfigCheckCommand(), newConfigExampleCommand())
}

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
		Long:  help("config check"),
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := loadLocal(cmd)
			if err != nil {
				return err
			}
			if _, err := newRelay(l.cfg, zap.NewNop(), prometheus.NewRegistry(), hooks{}); err != nil {
				return err
			}
			state, files := "valid", checkFiles(l.cfg)
			if files != nil {
				state = "valid but for its files"
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "# %s; %s\n\n%s", state, l.source(), effectiveYAML(l))
			return errors.Join(files, err)
		},
	}
	addConfigFlags(cmd)
	return cmd
}

// checkFiles has the functions of run open the files that the configuration names, and reports what they
// cannot use.
func checkFiles(cfg *Config) error {
	_, postgres := pg.Parse(cfg.Postgres.server())
	nats := natsConn(cfg)
	_, events := eventCheck(&cfg.Catalog)
	_, token := cfg.HTTP.token()
	var all problems
	for _, err := range []error{postgres, nats.CheckFiles(), events, token} {
		if err != nil {
			all = append(all, err)
		}
	}
	if all == nil {
		return nil
	}
	return &usageError{all}
}

func newConfigExampleCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "example",
		Short: "Print a configuration file with every key, its meaning and its default",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), exampleYAML())
			return err
		},
	}
	ignoreConfigFlag(cmd)
	return cmd
}
