package check_test

import (
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
)

// TestStartEndsWithFirstError: a start gets the error that the check found, with its cause, code and hint; what is
// below an error does not end it.
func TestStartEndsWithFirstError(t *testing.T) {
	var f check.Findings
	f.Note("pg-server", "", "PostgreSQL %d", 17)
	f.Warning("pg-clock", "set it", "the clock is off")
	f.Failed(check.Warn, "pg-unreachable", io.EOF)
	f.Failed(check.Error, "pg-unreachable", nil)
	f.If(false, "pg-version", io.EOF)
	if err := f.FirstError(); err != nil {
		t.Errorf("without an error a start ends with %v", err)
	}
	f.If(true, "table-columns", hint.Errorf("add it", "read: %w", io.EOF))
	f.Fault("slot-in-use", "end it", "process %d streams it", 7)
	f.Failed(check.Error, "pg-unreachable", errors.New("no answer"))
	for _, want := range []check.Finding{
		{Level: check.Error, Code: "table-columns", Text: "read: EOF", Fix: "add it"},
		{Level: check.Error, Code: "slot-in-use", Text: "process 7 streams it", Fix: "end it"},
	} {
		err := f.FirstError()
		if err == nil || err.Error() != want.Text || hint.Of(err) != want.Fix || hint.CodeOf(err) != want.Code {
			t.Fatalf("a start ends with %v [%s] (%s), want %+v", err, hint.CodeOf(err), hint.Of(err), want)
		}
		if errors.Is(err, io.EOF) != (want.Code == "table-columns") {
			t.Errorf("the cause of %v is lost", err)
		}
		i := slices.IndexFunc(f, func(g check.Finding) bool { return g.Level == check.Error })
		if g := f[i]; g.Code != want.Code || g.Text != want.Text || g.Fix != want.Fix {
			t.Errorf("found %+v, want %+v", g, want)
		}
		f = slices.Delete(f, i, i+1)
	}
	if last := f[len(f)-1]; last.Code != "pg-unreachable" || last.Text != "no answer" {
		t.Errorf("an error without a code is found as %+v", last)
	}
}

// TestDoctorsOrder: errors come first, what is found twice is told once, and [check.Findings.About] leaves the
// findings of others as they are.
func TestDoctorsOrder(t *testing.T) {
	var f check.Findings
	f.Note("a", "", "1")
	f.Warning("b", "", "2")
	f.Fault("c", "", "3")
	f.Warning("b", "", "2")
	f.Warning("b", "", "4")
	var got []string
	for _, one := range check.InOrder(f.About("x")) {
		got = append(got, string(one.Level)+" "+one.Code+" "+one.Text)
	}
	if want := []string{"error c x: 3", "warn b x: 2", "warn b x: 4", "info a x: 1"}; !slices.Equal(got, want) {
		t.Errorf("doctor tells %q, want %q", got, want)
	}
	if f[0].Text != "1" {
		t.Errorf("the finding became %q", f[0].Text)
	}
}
