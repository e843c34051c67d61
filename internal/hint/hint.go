// Package hint lets an error carry advice for the operator beside its text: what to run or what to change.
// The advice never becomes part of Error(), so that a wrapped error still reads "verb object: cause" on one
// line; whoever shows the error last (the command line, the log) asks Of for it.
package hint

import (
	"errors"
	"fmt"
	"strings"
)

// hinted is an error with advice. It is not exported: nobody branches on it, they ask Of.
type hinted struct {
	err  error
	hint string
}

func (e *hinted) Error() string { return e.err.Error() }
func (e *hinted) Unwrap() error { return e.err }

// Errorf is fmt.Errorf (with %w) for an error that carries hint.
func Errorf(hint, format string, args ...any) error {
	return Wrap(fmt.Errorf(format, args...), hint)
}

// Wrap adds hint to err without changing its text. A nil err stays nil, and an empty hint leaves err as it
// is.
func Wrap(err error, hint string) error {
	if err == nil || hint == "" {
		return err
	}
	return &hinted{err: err, hint: hint}
}

// Of returns the outermost hint found in err's tree, or "". The outermost wins because it was written with
// the most context: it knows what the operator was doing.
func Of(err error) string {
	var h *hinted
	if errors.As(err, &h) {
		return h.hint
	}
	return ""
}

// OneLine keeps the text of an error greppable: pgx and errors.Join write several lines.
func OneLine(s string) string {
	var out, last string
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		if line == last {
			continue // pgx tries a server with TLS and without, and fails twice alike
		}
		last = line
		switch {
		case out == "" || line == "":
			out += line
		case strings.HasSuffix(out, ":"):
			out += " " + line
		default:
			out += "; " + line
		}
	}
	return out
}
