package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/verify"
)

// TestVerifyTellsFindingsFromFailures: the exit code is 1 for both.
func TestVerifyTellsFindingsFromFailures(t *testing.T) {
	broken := hint.Errorf("look again", "connection lost")
	found := func(n int64) *verify.Report {
		r := &verify.Report{Messages: 17, Repaired: 3, Found: map[verify.Kind]*verify.Findings{}}
		for _, k := range verify.Kinds {
			r.Found[k] = &verify.Findings{}
		}
		r.Found[verify.Missing].Count = n
		return r
	}
	for name, c := range map[string]struct {
		report *verify.Report
		broken error
		want   string
		hint   string
	}{
		"nothing":               {found(0), nil, "", ""},
		"findings":              {found(2), nil, "2 faults were found", "`walpost verify --repair` publishes what is missing; if the stream was begun empty on purpose, compare its own time only: --since 1h"},
		"a failure":             {nil, broken, "connection lost", "look again"},
		"broken off":            {found(0), broken, "the comparison broke off, and the report is incomplete: connection lost", "look again"},
		"broken off in between": {found(2), broken, "the comparison broke off, and the report is incomplete: connection lost", "look again"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := tellVerify(&out, c.report, c.broken, false, false)
			text := ""
			if err != nil {
				text = err.Error()
			}
			if text != c.want || hint.Of(err) != c.hint || c.broken != nil && !errors.Is(err, c.broken) {
				t.Errorf("error %q, hint %q, want %q, %q", text, hint.Of(err), c.want, c.hint)
			}
			if printed := strings.Contains(out.String(), "repaired   3 rows"); printed != (c.report != nil) {
				t.Errorf("printed %q", out.String())
			}
			if clean := strings.HasSuffix(out.String(), "\nno fault was found: nothing is missing, duplicated or reordered\n"); clean != (name == "nothing") {
				t.Errorf("printed %q", out.String())
			}
			if c.report == nil {
				return
			}
			out.Reset()
			_ = tellVerify(&out, c.report, c.broken, false, true)
			var read verify.Report
			if err := json.Unmarshal(out.Bytes(), &read); err != nil || read.Messages != 17 {
				t.Errorf("printed %q: %v", out.String(), err)
			}
		})
	}
}
