package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestMain is also the shop's processes: this program starts itself for each.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && parts[os.Args[1]] != nil {
		os.Exit(runPart(os.Args[1]))
	}
	testenv.Main(m)
}

// TestShop places orders while everything is broken.
func TestShop(t *testing.T) {
	var stdout, stderr bytes.Buffer
	logs := t.TempDir()
	code := execute(t.Context(), []string{"-orders", "600", "-faults", "500ms", "-logs", logs}, &stdout, &stderr)
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	last := lines[len(lines)-1]
	want := regexp.MustCompile(`^walpost-shop: orders=600 placed=600 effects=1400 lost=0 duplicated=0 reordered=0 faults=[1-9]\d*$`)
	if code != 0 || !want.MatchString(last) {
		t.Errorf("it ended with %d\n%s%s", code, &stdout, &stderr)
	}
	if list := regexp.MustCompile(`, \d+ faults:\n(  [A-Za-z ]{18} +\d+\n)+\d+ requests`); !list.MatchString(stdout.String()) {
		t.Errorf("the faults are no list: %s", &stdout)
	}
	t.Logf("%s", stdout.String())
	files, _ := filepath.Glob(filepath.Join(logs, "*.log"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || bytes.Contains(text, []byte("deadlock detected")) {
			t.Errorf("%s: %v, or handlers wait for each other:\n%s", file, err, text)
		}
	}
	if len(files) < 4 {
		t.Errorf("logs: %q", files)
	}
}

func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{{"-orders", "0"}, {"-clients", "-1"}, {"-faults", "x"}, {"more"}} {
		var stdout, stderr bytes.Buffer
		if code := execute(t.Context(), args, &stdout, &stderr); code != exitUsage || stderr.Len() == 0 {
			t.Errorf("%v ended with %d: %s", args, code, &stderr)
		}
	}
}
