package audit

import (
	"fmt"
	"strings"
)

// Report is what a comparison found.
type Report struct {
	Rows, Messages int
	// Lost rows are not in the stream.
	Lost Offences
	// Duplicated messages carry a row that an earlier one carries.
	Duplicated Offences
	// Reordered messages come after one of a later row of their aggregate.
	Reordered Offences
	// Unknown messages are of no row that the table holds: never committed, with
	// another content, or another writer's.
	Unknown Offences
	// Altered messages have another body than their row's payload.
	Altered Offences
	// Regressed messages have a position that is not beyond the one before.
	Regressed Offences
	// Unmarked rows are still pending.
	Unmarked Offences
}

// Exact reports whether the stream is what the table says, and the table knows.
func (r *Report) Exact() bool {
	for _, o := range r.offences() {
		if o.Count > 0 {
			return false
		}
	}
	return true
}

// String is one line with the counts, and one for each kind of offence with the
// first few of them.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rows=%d messages=%d", r.Rows, r.Messages)
	all := r.offences()
	for _, o := range all {
		fmt.Fprintf(&b, " %s=%d", o.name, o.Count)
	}
	for _, o := range all {
		if o.Count > 0 {
			fmt.Fprintf(&b, "\n%s: %s", o.name, o.Offences)
		}
	}
	return b.String()
}

type named struct {
	name string
	Offences
}

func (r *Report) offences() []named {
	return []named{
		{"lost", r.Lost},
		{"duplicated", r.Duplicated},
		{"reordered", r.Reordered},
		{"unknown", r.Unknown},
		{"altered", r.Altered},
		{"regressed", r.Regressed},
		{"unmarked", r.Unmarked},
	}
}

// Offences are counted, and the first few kept.
type Offences struct {
	Count int
	First []string
}

// few is how many offences of a kind are named.
const few = 5

func (o *Offences) add(format string, args ...any) {
	o.Count++
	if len(o.First) < few {
		o.First = append(o.First, fmt.Sprintf(format, args...))
	}
}

func (o Offences) String() string {
	s := strings.Join(o.First, "; ")
	if more := o.Count - len(o.First); more > 0 {
		s += fmt.Sprintf("; and %d more", more)
	}
	return s
}
