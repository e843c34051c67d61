// Package check has what every check of the servers gives: findings. A start ends with the first error among
// them, and `walpost doctor` prints them all.
package check

import (
	"fmt"
	"slices"

	"github.com/walpost/walpost/internal/hint"
)

// Level says what a finding means.
type Level string

const (
	// Error: a start would refuse, nothing would be delivered, or events could be lost.
	Error Level = "error"
	// Warn: it works, and an operator should know.
	Warn Level = "warn"
	// Info is how things are.
	Info Level = "info"
)

// Finding is something about the servers that an operator should know.
type Finding struct {
	Level Level  `json:"level"`
	Code  string `json:"code"` // stable
	Text  string `json:"text"` // what is the case
	Fix   string `json:"fix"`  // what to do about it, "" where there is nothing to be done

	Err error `json:"-"` // what a start ends with; nil where it goes on
	// Shared: it is of a table that all outboxes share, and sets none of them aside.
	Shared bool `json:"-"`
}

// Findings gathers them, in the order in which they are found.
type Findings []Finding

// FirstError is what a start ends with, nil where it goes on.
func (f Findings) FirstError() error {
	for _, one := range f {
		if one.Err != nil {
			return one.Err
		}
	}
	return nil
}

// Own is what was found of an outbox alone.
func (f Findings) Own() Findings {
	return slices.DeleteFunc(slices.Clone(f), func(one Finding) bool { return one.Shared })
}

// SetAside has a start go on without the outbox of which this was found, but for what is shared.
func (f Findings) SetAside() {
	for i := range f {
		if !f[i].Shared {
			f[i].Err = nil
		}
	}
}

// If adds err under its code, as a finding of level Error, where bad holds.
func (f *Findings) If(bad bool, code string, err error) {
	if bad {
		f.Failed(Error, "", hint.Coded(code, err))
	}
}

// IfShared is If of what all outboxes share.
func (f *Findings) IfShared(bad bool, code string, err error) {
	f.If(bad, code, err)
	if bad {
		(*f)[len(*f)-1].Shared = true
	}
}

// Fault adds a finding of level Error.
func (f *Findings) Fault(code, fix, format string, args ...any) {
	f.If(true, code, hint.Errorf(fix, format, args...))
}

// Warning adds a finding of level Warn.
func (f *Findings) Warning(code, fix, format string, args ...any) {
	*f = append(*f, Finding{Level: Warn, Code: code, Text: fmt.Sprintf(format, args...), Fix: fix})
}

// Note adds a finding of level Info.
func (f *Findings) Note(code, fix, format string, args ...any) {
	*f = append(*f, Finding{Level: Info, Code: code, Text: fmt.Sprintf(format, args...), Fix: fix})
}

// Failed adds an error under its own code, or under otherwise where it has none. nil adds nothing.
func (f *Findings) Failed(level Level, otherwise string, err error) {
	if err == nil {
		return
	}
	found := Finding{Level: level, Code: hint.CodeOf(err), Text: err.Error(), Fix: hint.Of(err)}
	if found.Code == "" {
		found.Code = otherwise
	}
	if level == Error {
		found.Err = err
	}
	*f = append(*f, found)
}

// About has the texts begin with what they are about, such as "outbox public.events".
func (f Findings) About(what string) Findings {
	about := slices.Clone(f)
	for i := range about {
		about[i].Text = what + ": " + about[i].Text
	}
	return about
}

// InOrder has the errors first, and nothing twice: two checks may fail alike.
func InOrder(found Findings) Findings {
	levels := []Level{Error, Warn, Info}
	slices.SortStableFunc(found, func(a, b Finding) int {
		return slices.Index(levels, a.Level) - slices.Index(levels, b.Level)
	})
	var all Findings
	for _, f := range found {
		if !slices.ContainsFunc(all, func(g Finding) bool { return g.Code == f.Code && g.Text == f.Text }) {
			all = append(all, f)
		}
	}
	return all
}
