package main

import (
	"bytes"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/sleep"
)

// statusEvery is the pause between two reports.
const statusEvery = 2 * time.Second

// clearScreen has a terminal write from its top again.
const clearScreen = "\x1b[H\x1b[2J"

// watchStatus prints reports until the command's context is done: on a terminal in the place of the last one,
// elsewhere one after another. A server that cannot be asked does not end it.
func watchStatus(cmd *cobra.Command, cfg *Config, asJSON bool) error {
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	_, terminal := terminalWidth(w)
	for first := true; ; first = false {
		r, failed := askStatus(ctx, cfg)
		if ctx.Err() != nil {
			return nil
		}
		var text bytes.Buffer
		switch {
		case asJSON:
			_ = printJSON(&text, r)
		default:
			sheet{&text}.line("at", "%s, every %s until Ctrl-C", r.At.Format(time.RFC3339), statusEvery)
			_ = printStatus(&text, r, cfg, false) // a buffer takes all
			if terminal {
				fmt.Fprint(trusted(w), clearScreen)
			} else if !first {
				fmt.Fprintln(w)
			}
		}
		if _, err := w.Write(text.Bytes()); err != nil {
			return err
		}
		if failed != nil {
			printError(cmd.ErrOrStderr(), failed)
		}
		if !sleep.For(ctx, statusEvery) {
			return nil
		}
	}
}
