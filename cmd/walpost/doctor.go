package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/relay"
)

func newDoctorCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check both servers and what is between them", Long: help("doctor"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := load(cmd.Flags())
			if err != nil {
				return err
			}
			found, err := diagnose(cmd.Context(), l.cfg)
			if err != nil {
				return err
			}
			return tellFindings(cmd.OutOrStdout(), found, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	addConfigFlags(cmd)
	return cmd
}

// diagnose is everything that doctor finds.
func diagnose(ctx context.Context, cfg *Config) (check.Findings, error) {
	found, err := examine(ctx, cfg)
	if err != nil {
		return nil, err
	}
	found = append(found, examineCatalog(&cfg.Catalog)...)
	if _, err := cfg.HTTP.token(); err != nil {
		found.Failed(check.Error, "http-token-file", err)
	}
	return inLines(check.InOrder(append(found, cfg.strayVariables()...))), nil
}

// inLines has each text on one line.
func inLines(found check.Findings) check.Findings {
	for i := range found {
		found[i].Text, found[i].Fix = oneLine(found[i].Text), oneLine(found[i].Fix)
	}
	return found
}

func examine(ctx context.Context, cfg *Config) (check.Findings, error) {
	config, err := relayConfig(cfg)
	if err != nil {
		return nil, err
	}
	config.NATS.Name = "walpost doctor"
	r, err := relay.New(config, zap.NewNop(), prometheus.NewRegistry())
	if err != nil {
		return nil, &usageError{err}
	}
	found := r.Examine(ctx)
	return found, ctx.Err()
}

// errFaults ends the command with exit code 1. The findings have been printed by then.
var errFaults = errors.New("the relay would not work as it should")

func tellFindings(w io.Writer, found check.Findings, asJSON bool) error {
	number := map[check.Level]int{}
	for _, f := range inLines(found) {
		number[f.Level]++
	}
	if err := printFindings(w, found, number, asJSON); err != nil {
		return err
	}
	if number[check.Error] > 0 {
		return &silentError{errFaults}
	}
	return nil
}

var levelColours = map[check.Level]string{check.Error: red, check.Warn: yellow}

func printFindings(w io.Writer, found check.Findings, number map[check.Level]int, asJSON bool) error {
	if asJSON {
		return printJSON(w, map[string]any{"findings": append(check.Findings{}, found...)})
	}
	for _, f := range found {
		paint(w, levelColours[f.Level], fmt.Sprintf("%-5s", f.Level))
		fmt.Fprintf(w, "  %s: %s\n", f.Code, f.Text)
		if f.Fix != "" {
			fmt.Fprintf(w, "       fix: %s\n", f.Fix)
		}
	}
	_, err := fmt.Fprintln(w, tally(number))
	return err
}

func tally(number map[check.Level]int) string {
	var parts []string
	if n := number[check.Error]; n > 0 {
		parts = append(parts, count(n, "error"))
	}
	if n := number[check.Warn]; n > 0 {
		parts = append(parts, count(n, "warning"))
	}
	if len(parts) == 0 {
		return "all is well"
	}
	return strings.Join(parts, ", ")
}
