// Package check has what every check of the servers gives: findings. A start ends with the first error among
// them, and `walpost doctor` prints them all.
package check

import (
	"fmt"
	"slices"

	"github.com/walpost/walpost/internal/hint"
)

// Problems are what a start refuses, in the order in which it meets them: it stops at the first, `walpost
// doctor` tells all.
type Problems []error

// If adds err, with its code, where bad holds.
func (p *Problems) If(bad bool, code string, err error) {
	if bad {
		*p = append(*p, hint.Coded(code, err))
	}
}

// First is what a start ends with, nil where nothing is wrong.
func (p Problems) First() error {
	if len(p) == 0 {
		return nil
	}
	return p[0]
}

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
}

// Findings gathers them, in the order in which they are found.
type Findings []Finding

// Fault adds a finding of level Error.
func (f *Findings) Fault(code, fix, format string, args ...any) {
	*f = append(*f, Finding{Error, code, fmt.Sprintf(format, args...), fix})
}

// Warning adds a finding of level Warn.
func (f *Findings) Warning(code, fix, format string, args ...any) {
	*f = append(*f, Finding{Warn, code, fmt.Sprintf(format, args...), fix})
}

// Note adds a finding of level Info.
func (f *Findings) Note(code, fix, format string, args ...any) {
	*f = append(*f, Finding{Info, code, fmt.Sprintf(format, args...), fix})
}

// Failed adds an error under its own code, or under otherwise where it has none. nil adds nothing.
func (f *Findings) Failed(level Level, otherwise string, err error) {
	if err == nil {
		return
	}
	code := hint.CodeOf(err)
	if code == "" {
		code = otherwise
	}
	*f = append(*f, Finding{level, code, err.Error(), hint.Of(err)})
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
