package main

import (
	"bytes"
	"os"
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
	code := execute(t.Context(), []string{"-orders", "600", "-faults", "500ms"}, &stdout, &stderr)
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	last := lines[len(lines)-1]
	want := regexp.MustCompile(`^walpost-shop: orders=600 placed=600 effects=1400 lost=0 duplicated=0 reordered=0 faults=[1-9]\d*$`)
	if code != 0 || !want.MatchString(last) {
		t.Errorf("it ended with %d\n%s%s", code, &stdout, &stderr)
	}
	t.Logf("%s", stdout.String())
}

func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{{"-orders", "0"}, {"-clients", "-1"}, {"-faults", "x"}, {"more"}} {
		var stdout, stderr bytes.Buffer
		if code := execute(t.Context(), args, &stdout, &stderr); code != exitUsage || stderr.Len() == 0 {
			t.Errorf("%v ended with %d: %s", args, code, &stderr)
		}
	}
}
