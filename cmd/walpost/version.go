package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the release build: -ldflags "-X main.version=1.2.3".
var version = ""

// build is what is known about this binary.
type build struct{ Version, Revision, Go string }

func (b build) String() string {
	return fmt.Sprintf("walpost %s (%s, %s)", b.Version, b.Revision, b.Go)
}

func buildVersion() build {
	b := build{Version: version, Revision: "unknown revision", Go: "unknown Go"}
	info, ok := debug.ReadBuildInfo()
	if ok {
		b.Go = info.GoVersion
		if b.Version == "" && info.Main.Version != "(devel)" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				b.Revision = s.Value[:min(12, len(s.Value))]
			}
		}
	}
	if b.Version == "" {
		b.Version = "devel"
	}
	return b
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version, the revision and the Go version it was built with",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), buildVersion())
			return err
		},
	}
}
