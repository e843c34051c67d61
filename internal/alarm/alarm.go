// Package alarm has the table of the alarms (table.go): what an operator must know of. The relay's log lines
// and counters, the console, the rule WalpostAlarm and docs/ALARMS.md come from it.
package alarm

import (
	"cmp"
	"slices"
)

// Severities of an alarm. Critical means that events were lost, that all of them wait, that the disk fills,
// or that a second relay writes.
const (
	Critical = "critical"
	Warning  = "warning"
)

// Alarm is an entry of the table. No other package can make one.
type Alarm struct{ name, severity, meaning, over string }

// Name returns the field alarm of a log line and the label alarm of walpost_alarms_total.
func (a *Alarm) Name() string { return a.name }

// Severity returns Critical or Warning.
func (a *Alarm) Severity() string { return a.severity }

// Meaning returns the log line that raises the alarm, at level error.
func (a *Alarm) Meaning() string { return a.meaning }

// Over returns the log line, at level info, that says that the alarm's cause is gone.
func (a *Alarm) Over() string { return a.over }

var entries []*Alarm

// entry adds an alarm to the table. An alarm whose cause can end without a new session has a line for that.
func entry(name, severity, meaning string, over ...string) *Alarm {
	a := &Alarm{name: name, severity: severity, meaning: meaning}
	for _, line := range over {
		a.over = line
	}
	entries = append(entries, a)
	return a
}

// All returns every alarm, in the order of the names.
func All() []*Alarm {
	byName := func(a, b *Alarm) int { return cmp.Compare(a.name, b.name) }
	return slices.SortedFunc(slices.Values(entries), byName)
}

// Find returns the alarm of a name, nil if this version has none.
func Find(name string) *Alarm {
	for _, a := range entries {
		if a.name == name {
			return a
		}
	}
	return nil
}
