package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestRemovalNamesTheSlot: who removes the package, and does not upgrade it, is told of the slot, in one line.
func TestRemovalNamesTheSlot(t *testing.T) {
	dir := t.TempDir()
	script, err := os.ReadFile("../../deploy/packages/preremove.sh")
	if err != nil {
		t.Fatal(err)
	}
	own := strings.NewReplacer("/etc/walpost", dir, "/run/systemd", dir).Replace(string(script))
	run := func(arg string) string {
		t.Helper()
		cmd := exec.Command("sh", "-s", arg)
		cmd.Stdin = strings.NewReader(own)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", arg, err, out)
		}
		return string(out)
	}
	if out := run("remove"); out != "" {
		t.Errorf("without a configuration it says %q", out)
	}
	if err := os.WriteFile(filepath.Join(dir, "walpost.yaml"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for arg, want := range map[string]int{"remove": 1, "0": 1, "upgrade": 0, "1": 0} {
		out := run(arg)
		if strings.Count(out, "\n") != want || want > 0 && !strings.Contains(out, "walpost slot drop") {
			t.Errorf("%s: it says %q", arg, out)
		}
	}
}
