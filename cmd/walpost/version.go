package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// version and revision are set by make build and the Dockerfile: -ldflags "-X main.version=1.2.3". Elsewhere
// Go stamps what it knows.
var version, revision string

// commitTime is set by make build, too, in RFC 3339.
var commitTime string

// build is what is known about this binary.
type build struct {
	Version    string  `json:"version"`
	Revision   string  `json:"revision"`
	CommitTime *string `json:"commit_time"` // RFC 3339; null where it is not known
	Dirty      *bool   `json:"dirty"`       // the checkout had changes; null where it is not known
	Go         string  `json:"go"`
	Platform   string  `json:"platform"`
}

func (b build) String() string {
	return fmt.Sprintf("walpost %s (%s, %s)", b.Version, b.Revision, b.Go)
}

func buildVersion() build {
	b := build{
		Version: version, Revision: revision, Go: "unknown Go",
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	b.stamped()
	if info, ok := debug.ReadBuildInfo(); ok {
		b.Go = info.GoVersion
		if b.Version == "" && info.Main.Version != "(devel)" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			b.setting(s)
		}
	}
	b.Version = cmp.Or(b.Version, "devel")
	b.Revision = cmp.Or(b.Revision, "unknown revision")
	return b
}

// stamped takes what make build says.
func (b *build) stamped() {
	if at, err := time.Parse(time.RFC3339, commitTime); err == nil {
		b.CommitTime = new(at.UTC().Format(time.RFC3339))
	}
	if b.Revision != "" {
		b.Dirty = new(strings.HasSuffix(b.Revision, "-dirty"))
	}
}

// setting takes what Go stamps in a checkout, unless make build has said it.
func (b *build) setting(s debug.BuildSetting) {
	switch {
	case s.Key == "vcs.revision" && b.Revision == "":
		b.Revision = s.Value[:min(12, len(s.Value))]
	case s.Key == "vcs.time" && b.CommitTime == nil:
		b.CommitTime = new(s.Value)
	case s.Key == "vcs.modified" && b.Dirty == nil:
		b.Dirty = new(s.Value == "true")
	}
}

// details are the lines of `walpost version`.
func (b build) details() string {
	checkout := "unknown checkout"
	if b.Dirty != nil {
		checkout = "a clean checkout"
		if *b.Dirty {
			checkout = "a checkout with changes"
		}
	}
	at := "unknown"
	if b.CommitTime != nil {
		at = *b.CommitTime
	}
	return fmt.Sprintf("%s\n  commit time  %s\n  platform     %s\n  built from   %s\n",
		b, at, b.Platform, checkout)
}

func newVersionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, revision, commit time, Go version and platform of the build",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := buildVersion()
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(b)
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), b.details())
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	ignoreConfigFlag(cmd)
	return cmd
}
