package catalog

import (
	"fmt"
	"strings"
)

// Level says what a [Problem] means.
type Level string

const (
	// Error: the catalogue cannot be used, or breaks a rule that holds without exception.
	Error Level = "error"
	// Warn is something to think about.
	Warn Level = "warn"
)

// Problem is something that is wrong with a catalogue.
type Problem struct {
	Level Level  `json:"level"`
	Code  string `json:"code"` // stable
	File  string `json:"file"` // within the catalogue, "" for all of it
	Line  int    `json:"line"` // from 1, 0 for the whole file
	Text  string `json:"text"`
	Fix   string `json:"fix"`

	rule bool // of `walpost catalog check`; the catalogue can be used nevertheless
}

// Error is the text behind the place, as in "orders.yaml:7: no owner".
func (p Problem) Error() string {
	switch {
	case p.File == "":
		return p.Text
	case p.Line == 0:
		return p.File + ": " + p.Text
	}
	return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Text)
}

// Problems are all that were found, in the order of files and lines.
type Problems []Problem

func (p Problems) Error() string {
	var lines []string
	for _, one := range p {
		lines = append(lines, one.Error())
	}
	return strings.Join(lines, "\n")
}

// Errors counts those of level [Error].
func (p Problems) Errors() (n int) {
	for _, one := range p {
		if one.Level == Error {
			n++
		}
	}
	return n
}

// place is a line of a file.
type place struct {
	file string
	line int
}

// report gathers problems.
type report struct{ problems Problems }

func (r *report) add(p Problem, at place, format string, args []any) {
	p.File, p.Line, p.Text = at.file, at.line, fmt.Sprintf(format, args...)
	r.problems = append(r.problems, p)
}

// fault is a problem with which the catalogue cannot be used.
func (r *report) fault(at place, code, fix, format string, args ...any) {
	r.add(Problem{Level: Error, Code: code, Fix: fix}, at, format, args)
}

// breach is a broken rule: payloads can be checked nevertheless.
func (r *report) breach(at place, code, fix, format string, args ...any) {
	r.add(Problem{Level: Error, Code: code, Fix: fix, rule: true}, at, format, args)
}

// doubt is a broken rule that has exceptions.
func (r *report) doubt(at place, code, fix, format string, args ...any) {
	r.add(Problem{Level: Warn, Code: code, Fix: fix, rule: true}, at, format, args)
}
