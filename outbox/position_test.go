package outbox_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/walpost/walpost/outbox"
)

func TestPosition(t *testing.T) {
	for want, p := range map[string]outbox.Position{
		"7555555555555555555/1/16/B374D848/2/0/0": {SystemID: "7555555555555555555", Timeline: 1, Commit: 0x16_B374D848, N: 2},
		"x/4294967295/FFFFFFFF/FFFFFFFF/4294967295/1/A": {
			SystemID: "x", Timeline: math.MaxUint32, Commit: math.MaxUint64, N: math.MaxUint32, Passed: 1<<32 | 0xA,
		},
		"7/0/0/0/0/0/0": {SystemID: "7"},
	} {
		if got := p.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if got, err := outbox.ParsePosition(want); err != nil || got != p {
			t.Errorf("parse %s: %+v, %v", want, got, err)
		}
	}
}

func TestParsePositionErrors(t *testing.T) {
	for s, want := range map[string]string{
		"":                           "want <system id>",
		"7/1/0/0/1/0":                "want <system id>",
		"7/1/0/0/1/0/0/0":            "want <system id>",
		"/1/0/0/1/0/0":               "want <system id>",
		"7/-1/0/0/1/0/0":             "timeline",
		"7/4294967296/0/0/1/0/0":     "timeline",
		"7/1/G/0/1/0/0":              "commit LSN",
		"7/1/0/0/x/0/0":              "ordinal",
		"7/1/0/0/4294967296/0/0":     "ordinal",
		"7/1/0/0/1/0/100000000":      "passed LSN",
		"7/1/0/0/1//0":               "passed LSN",
		"7/1/100000000/100000000/1/": "want <system id>",
		strings.Repeat("7", 200) + "/1/0/0/1/0/0": "a position of 212 bytes",
	} {
		if p, err := outbox.ParsePosition(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parse %q: %+v, %v, want %q", s, p, err, want)
		}
	}
}

func TestPositionCovers(t *testing.T) {
	p := outbox.Position{Commit: 100, N: 5}
	for at, want := range map[[2]uint32]bool{
		{99, 1}: true, {99, 9}: true, {100, 4}: true, {100, 5}: true, {100, 6}: false, {101, 1}: false, {0, 0}: true,
	} {
		if got := p.Covers(outbox.LSN(at[0]), at[1]); got != want {
			t.Errorf("covers %v: %t", at, got)
		}
	}
}

func FuzzParsePosition(f *testing.F) {
	f.Add("7555555555555555555/1/16/B374D848/2/0/0")
	f.Add("7/1/0/0/0/0/0")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := outbox.ParsePosition(s)
		if err != nil {
			return
		}
		if again, err := outbox.ParsePosition(p.String()); err != nil || again != p {
			t.Errorf("%q is %+v, and that is %+v, %v", s, p, again, err)
		}
		if want := fmt.Sprintf("%s/%d/%s/%d/%s", p.SystemID, p.Timeline, p.Commit, p.N, p.Passed); p.String() != want {
			t.Errorf("%s, want %s", p, want)
		}
		if !p.Covers(p.Commit, p.N) {
			t.Errorf("%s does not cover itself", p)
		}
	})
}
