package main

import (
	"cmp"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version and revision are set by make build and the Dockerfile: -ldflags "-X main.version=1.2.3". Elsewhere
// Go stamps what it knows.
var version, revision string

// build is what is known about this binary.
type build struct{ Version, Revision, Go string }

func (b build) String() string {
	return fmt.Sprintf("walpost %s (%s, %s)", b.Version, b.Revision, b.Go)
}

func buildVersion() build {
	b := build{Version: version, Revision: revision, Go: "unknown Go"}
	info, ok := debug.ReadBuildInfo()
	if ok {
		b.Go = info.GoVersion
		if b.Version == "" && info.Main.Version != "(devel)" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && b.Revision == "" {
				b.Revision = s.Value[:min(12, len(s.Value))]
			}
		}
	}
	b.Version = cmp.Or(b.Version, "devel")
	b.Revision = cmp.Or(b.Revision, "unknown revision")
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
