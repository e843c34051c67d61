package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// script runs a script of the packages in a directory instead of /.
func script(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/packages/" + name)
	if err != nil {
		t.Fatal(err)
	}
	own := strings.NewReplacer("/etc/walpost", dir, "/run/systemd", dir, "--root=/", "--root="+dir).Replace(string(text))
	cmd := exec.Command("sh", append([]string{"-s"}, args...)...)
	cmd.Stdin = strings.NewReader(own)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v: %s", name, args, err, out)
	}
	return string(out)
}

// TestRemovalNamesTheSlot: who removes the package, and does not upgrade it, is told of each relay's slot, in one line.
func TestRemovalNamesTheSlot(t *testing.T) {
	dir := t.TempDir()
	writeUnits(t, dir)
	run := func(arg string) string { t.Helper(); return script(t, dir, "preremove.sh", arg) }
	if out := run("remove"); out != "" {
		t.Errorf("without a configuration it says %q", out)
	}
	for _, name := range []string{"walpost.yaml", "shop 2.yaml"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for arg, want := range map[string]int{"remove": 2, "0": 2, "upgrade": 0, "1": 0} {
		out := run(arg)
		if strings.Count(out, "\n") != want || want > 0 && !strings.Contains(out, "walpost slot drop --config "+dir+"/shop 2.yaml'") {
			t.Errorf("%s: it says %q", arg, out)
		}
	}
}

func writeUnits(t *testing.T, dir string) {
	t.Helper()
	units, err := testRelease(t).units()
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range units {
		if err := writeFile(filepath.Join(dir, "usr/lib/systemd/system", u.name), u.data); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRemovalLeavesNoLink: the relays that were enabled are no longer.
func TestRemovalLeavesNoLink(t *testing.T) {
	if _, err := exec.LookPath("systemctl"); err != nil {
		t.Skip("systemctl is not here")
	}
	dir := t.TempDir()
	writeUnits(t, dir)
	out, err := exec.Command("systemctl", "--root="+dir, "enable", "walpost", "walpost@shop_2", "walpost@b-c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	links := filepath.Join(dir, "etc/systemd/system/*/*")
	if enabled, _ := filepath.Glob(links); len(enabled) != 3 {
		t.Fatalf("enabled are %q", enabled)
	}
	script(t, dir, "preremove.sh", "upgrade")
	if enabled, _ := filepath.Glob(links); len(enabled) != 3 {
		t.Errorf("an upgrade leaves %q", enabled)
	}
	script(t, dir, "preremove.sh", "remove")
	if enabled, _ := filepath.Glob(links); len(enabled) != 0 {
		t.Errorf("the removal leaves %q", enabled)
	}
}

// TestScriptsAskForEveryRelay: where systemd runs, a removal stops the template's relays, and an upgrade restarts them.
func TestScriptsAskForEveryRelay(t *testing.T) {
	dir := t.TempDir()
	fake := "#!/bin/sh\necho \"$*\" >>" + dir + "/asked\n"
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "system"), 0o700),
		os.WriteFile(filepath.Join(dir, "systemctl"), []byte(fake), 0o700)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for want, args := range map[string][]string{
		"try-restart walpost.service walpost@*.service\n": {"postinstall.sh", "configure", "1.2.3"},
		"stop walpost.service walpost@*.service\n":        {"preremove.sh", "remove"},
	} {
		script(t, dir, args[0], args[1:]...)
		if asked := string(read(t, filepath.Join(dir, "asked"))); !strings.Contains(asked, want) {
			t.Errorf("%s asked systemctl\n%s, want %q", args, asked, want)
		}
	}
}
