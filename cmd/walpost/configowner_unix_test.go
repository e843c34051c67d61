//go:build unix

package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// TestForeignConfiguration: what somebody has left in a folder is not read unless it is named.
func TestForeignConfiguration(t *testing.T) {
	root := os.Geteuid() == 0
	for name, x := range map[string]struct {
		uid, gid int
		mode     os.FileMode
		want     string
	}{
		"own":                {0, 0, 0o600, ""},
		"own group writes":   {0, 0, 0o660, ""},
		"another user's":     {12345, 0, 0o600, "walpost.yaml here belongs to user 12345"},
		"another group":      {0, 12345, 0o640, ""},
		"that writes":        {0, 12345, 0o660, "walpost.yaml here may be written by others (mode 0660)"},
		"all may write":      {0, 0, 0o602, "walpost.yaml here may be written by others (mode 0602)"},
		"all may read":       {0, 0, 0o644, ""},
		"all and its writer": {12345, 12345, 0o666, "belongs to user 12345"},
	} {
		if !root && x.uid+x.gid > 0 {
			continue // only root gives files away
		}
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			for _, err := range []error{
				os.WriteFile("walpost.yaml", []byte("postgres: {slot: theirs}\n"), 0o600),
				os.Chmod("walpost.yaml", x.mode), os.Chown("walpost.yaml", x.uid, x.gid),
			} {
				if err != nil && (root || !os.IsPermission(err)) {
					t.Fatal(err)
				}
			}
			for _, args := range [][]string{{"config", "check"}, {"config", "check", "--config", "walpost.yaml"}} {
				var out bytes.Buffer
				code := execute(t.Context(), args, &out, &out)
				if refused := x.want != "" && len(args) == 2; refused != (code == 2) || refused && !strings.Contains(out.String(), x.want) ||
					refused && !strings.Contains(out.String(), "hint: name it with --config") {
					t.Errorf("%q ended with %d: %s", args, code, &out)
				}
			}
		})
	}
}
