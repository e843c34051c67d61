package check_test

import (
	"context"
	"slices"
	"testing"

	"github.com/walpost/walpost/internal/check"
)

// TestStartMakesItsOwnChecks: a start leaves out what only doctor checks, and makes none after the first error.
// Doctor makes all.
func TestStartMakesItsOwnChecks(t *testing.T) {
	var made []string
	look := func(name string, level check.Level) func(context.Context) check.Findings {
		return func(context.Context) check.Findings {
			made = append(made, name)
			if level == check.Error {
				return check.Findings{{Level: level, Code: name, Text: name, Err: context.Canceled}}
			}
			return check.Findings{{Level: level, Code: name, Text: name}}
		}
	}
	list := check.List{
		check.StartAndDoctor("a", look("a", check.Warn)),
		check.DoctorOnly("b", look("b", check.Error)),
		check.StartAndDoctor("c", look("c", check.Error)),
		check.StartAndDoctor("d", look("d", check.Error)),
	}
	if err := list.Start(t.Context()); err != context.Canceled || !slices.Equal(made, []string{"a", "c"}) {
		t.Errorf("a start made %q and ends with %v", made, err)
	}
	if err := list[:2].Start(t.Context()); err != nil {
		t.Errorf("a start ends with %v for what only doctor checks", err)
	}
	made = nil
	var codes []string
	for _, f := range list.All(t.Context()) {
		codes = append(codes, f.Code)
	}
	if !slices.Equal(made, []string{"a", "b", "c", "d"}) || !slices.Equal(codes, []string{"b", "c", "d", "a"}) {
		t.Errorf("doctor made %q and tells %q", made, codes)
	}
}
