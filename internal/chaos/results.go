package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/walpost/walpost/outbox"
)

// result is what became of one run.
type result struct {
	Seed       uint64         `json:"seed"`
	Case       string         `json:"case,omitempty"` // of a possible loss
	Servers    string         `json:"servers"`
	Faults     map[string]int `json:"faults"`
	Events     int            `json:"events"`
	Lost       int            `json:"lost"`
	Duplicated int            `json:"duplicated"`
	Replays    int            `json:"replays,omitempty"` // requests that were checked
	Reordered  int            `json:"reordered"`
	Altered    int            `json:"altered"`
	Unknown    int            `json:"unknown"`
	Pending    int            `json:"pending"`
	LostBefore int            `json:"lost_before,omitempty"` // by a possible loss, before it was repaired
	Phantoms   int            `json:"phantoms"`              // of transactions that a failover lost
	Dead       int            `json:"dead_letters"`          // rows that could not be sent
	Vanished   int            `json:"vanished"`              // aggregates and rows unlike what was committed
	Regressed  int            `json:"regressed"`             // messages of a position before the last one's
	Buried     int            `json:"buried"`                // dead letters that could have been sent
	Looks      int            `json:"looks"`                 // of the observer, at the marks
	Judged     int            `json:"judged"`                // confirmed LSNs, by the observer
	Restarts   int            `json:"restarts"`              // of relays
	Peak       int64          `json:"peak"`                  // of a relay's resident memory, in bytes
	Took       time.Duration  `json:"took"`
	// Recoveries are the times from the end of each fault that came alone to when
	// everything committed by then was stored and marked.
	Recoveries map[string][]time.Duration `json:"recoveries"`
	// Moments are what an observer saw wrong while all went on.
	Moments []string       `json:"moments,omitempty"`
	Alarms  map[string]int `json:"alarms,omitempty"` // of the relays
	// Cause is written by hand into the results that are kept: what was wrong, and
	// what became of it.
	Cause   string `json:"cause,omitempty"`
	Failure string `json:"failure,omitempty"`
	Details string `json:"details,omitempty"`
}

// mostMemory is what docs/OPERATIONS.md says of a relay with the defaults and small ids.
const mostMemory = (30 + 32 + 4 + 8 + 4) << 20

func (r *result) ok() bool {
	if r.Case != "" { // no promise, and yet nothing is lost for good or comes twice
		return r.Failure == "" && r.Lost+r.Duplicated+r.Altered+r.Unknown+r.Pending+r.Vanished+r.Buried == 0
	}
	return r.Failure == "" && len(r.Moments) == 0 && len(r.unexplained()) == 0 && r.sum() == 0 &&
		!r.blind() && r.Peak <= mostMemory
}

// blind reports whether the observer has seen too little to say anything.
func (r *result) blind() bool {
	return r.Looks < 3 || r.Judged < 3 && strings.Contains(r.Servers, ", auto,")
}

// noticed reports whether something is wrong in one way: a count by its name, an
// alarm by its own, or words of the observer's.
func (r *result) noticed(way string) bool {
	for _, x := range r.counts() {
		if x.what == way && x.n > 0 {
			return true
		}
	}
	says := func(moment string) bool { return strings.Contains(moment, way) }
	return slices.Contains(r.unexplained(), way) || slices.ContainsFunc(r.Moments, says)
}

func (r *result) sum() (n int) {
	for _, c := range r.counts() {
		n += c.n
	}
	return n
}

type named struct {
	what string
	n    int
}

func (r *result) counts() []named {
	if r.Faults[anotherWriter] > 0 {
		return []named{
			{"lost", r.Lost},
			{"duplicated", r.Duplicated},
			{"altered", r.Altered},
			{"unknown", r.Unknown},
			{"pending", r.Pending},
			{"vanished", r.Vanished},
		}
	}
	return []named{
		{"lost", r.Lost},
		{"duplicated", r.Duplicated},
		{"reordered", r.Reordered},
		{"altered", r.Altered},
		{"unknown", r.Unknown},
		{"pending", r.Pending},
		{"vanished", r.Vanished},
		{"buried", r.Buried},
		{"regressed", r.Regressed},
	}
}

// unexplained are alarms that none of the faults can have caused.
func (r *result) unexplained() (all []string) {
	for alarm, by := range map[string][]string{
		"events_lost":        {"store rolled back", "message deleted"},
		"stream_rolled_back": {"store rolled back"},
		"false_duplicate":    {"message deleted", anotherWriter},
		"foreign_message":    {anotherWriter},
		"forged_message":     {anotherWriter},
		"nothing_to_compare": nil, "panic: ": nil, "fatal error: ": nil, "did not stop": nil,
		"missed_rows": nil, "undecodable": nil, "stream_gone": nil,
		"stream_replaced": nil, "synchronous": nil,
	} {
		explained := slices.ContainsFunc(by, func(fault string) bool { return r.Faults[fault] > 0 })
		if r.Alarms[alarm] > 0 && !explained {
			all = append(all, alarm)
		}
	}
	slices.Sort(all)
	return all
}

// why says in few words what is wrong with a run.
func (r *result) why() string {
	var all []string
	for _, x := range r.counts() {
		if x.n > 0 {
			all = append(all, fmt.Sprintf("%s=%d", x.what, x.n))
		}
	}
	all = append(all, r.Moments...)
	for _, alarm := range r.unexplained() {
		all = append(all, "alarm "+alarm)
	}
	if r.Peak > mostMemory {
		all = append(all, fmt.Sprintf("a relay had %d MiB of memory", r.Peak>>20))
	}
	if r.Failure != "" {
		all = append(all, r.Failure)
	} else if r.blind() {
		all = append(all, fmt.Sprintf("the observer has seen too little: "+
			"%d looks at the marks, %d at confirmed LSNs", r.Looks, r.Judged))
	}
	return strings.Join(all, "; ")
}

func (r *result) faults() (n int) {
	for _, c := range r.Faults {
		n += c
	}
	return n
}

func (r *result) longest() (d time.Duration) {
	for _, all := range r.Recoveries {
		d = max(d, slices.Max(all))
	}
	return d
}

func (r *result) String() string {
	var kinds []string
	for _, k := range slices.Sorted(maps.Keys(r.Faults)) {
		kinds = append(kinds, fmt.Sprintf("%s %d", k, r.Faults[k]))
	}
	s := fmt.Sprintf("seed=%d %s: %d faults (%s), events=%d lost=%d duplicated=%d reordered=%d "+
		"longest_recovery=%s memory=%dMiB took=%s",
		r.Seed, r.Servers, r.faults(), strings.Join(kinds, ", "), r.Events, r.Lost, r.Duplicated, r.Reordered,
		r.longest().Round(time.Millisecond), r.Peak>>20, r.Took.Round(time.Second))
	if r.Phantoms > 0 {
		s += fmt.Sprintf(" phantoms=%d", r.Phantoms)
	}
	if !r.ok() {
		s += fmt.Sprintf(" FAILED: %s\n%s", r.why(), r.Details)
	}
	return s
}

func (r *result) save(name string) error {
	if name == "" {
		return nil
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(json.NewEncoder(f).Encode(r), f.Close())
}

// readResults reads a results file: the runs, and those of possible losses by case.
func readResults(name string) (runs []*result, cases map[string][]*result, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	cases = map[string][]*result{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		r := new(result)
		if err := json.Unmarshal(lines.Bytes(), r); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
		if r.Case != "" {
			cases[r.Case] = append(cases[r.Case], r)
			continue
		}
		runs = append(runs, r)
	}
	return runs, cases, lines.Err()
}

// printSummary adds up a results file, as Markdown.
func printSummary(w io.Writer, name string) error {
	runs, cases, err := readResults(name)
	if err != nil {
		return err
	}
	var b strings.Builder
	b.WriteString("### Counts\n\n" +
		"| Servers | Runs | Faults | Events | Lost | Duplicated | Reordered | Phantoms | Failed |\n" +
		"| --- | --: | --: | --: | --: | --: | --: | --: | --: |\n")
	byServers := map[string][]*result{}
	for _, r := range runs {
		kind, _, _ := strings.Cut(r.Servers, ", relays")
		byServers[kind] = append(byServers[kind], r)
	}
	for _, kind := range slices.Sorted(maps.Keys(byServers)) {
		addUp(&b, kind, byServers[kind])
	}
	addUp(&b, "**all**", runs)
	journaled := slices.DeleteFunc(slices.Clone(runs), func(r *result) bool {
		return !strings.HasSuffix(r.Servers, ", mark journal")
	})
	addUp(&b, "of these with `mark: journal`", journaled)
	addUpRollbacks(&b, runs)
	b.WriteString("\n### Recovery\n\n" +
		"| Fault | Times | alone | p50 | max |\n" +
		"| --- | --: | --: | --: | --: |\n")
	addUpFaults(&b, runs)
	b.WriteString("\n### What can be lost\n\n" +
		"| What happens | Runs | Events | Lost | after `verify --repair` " +
		"| Duplicated | Reordered | Phantoms |\n" +
		"| --- | --: | --: | --: | --: | --: | --: | --: |\n")
	for _, c := range possibles {
		addUpCase(&b, &c, cases[c.name])
	}
	addUpFailed(&b, runs)
	_, err = io.WriteString(w, b.String())
	return err
}

// addUpRollbacks counts the stores that were rolled back, and how often a relay had to store rows again.
func addUpRollbacks(w io.Writer, runs []*result) {
	fmt.Fprint(w, "\n### Stores rolled back\n\n"+
		"| Mark | Runs | Rollbacks | Healed | Events | Lost | Duplicated | Reordered |\n"+
		"| --- | --: | --: | --: | --: | --: | --: | --: |\n")
	for _, mark := range marks {
		var sum result
		n, rollbacks, healed := 0, 0, 0
		for _, r := range runs {
			of, journals := r.Faults["store rolled back"], strings.HasSuffix(r.Servers, ", mark journal")
			if of == 0 || journals != (mark == string(outbox.MarkJournal)) {
				continue
			}
			n, rollbacks, healed = n+1, rollbacks+of, healed+r.Alarms["stream_rolled_back"]
			sum.Events += r.Events
			sum.Lost += r.Lost
			sum.Duplicated += r.Duplicated
			sum.Reordered += r.Reordered
		}
		fmt.Fprintf(w, "| `%s` | %d | %d | %d | %d | %d | %d | %d |\n", mark, n, rollbacks, healed,
			sum.Events, sum.Lost, sum.Duplicated, sum.Reordered)
	}
}

// addUpFailed tells of every run that failed.
func addUpFailed(w io.Writer, runs []*result) {
	failed := slices.DeleteFunc(slices.Clone(runs), (*result).ok)
	if len(failed) == 0 {
		return
	}
	fmt.Fprintf(w, "\n### Runs that failed\n\n"+
		"| Seed | Failure | Cause, and whether it is mended |\n"+
		"| --: | --- | --- |\n")
	for _, r := range failed {
		fmt.Fprintf(w, "| %d | %s | %s |\n", r.Seed, r.why(), r.Cause)
	}
}

func addUpFaults(w io.Writer, runs []*result) {
	faults, recoveries := map[string]int{}, map[string][]time.Duration{}
	for _, r := range runs {
		for k, n := range r.Faults {
			faults[k] += n
		}
		for k, d := range r.Recoveries {
			recoveries[k] = append(recoveries[k], d...)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(faults)) {
		d := recoveries[k]
		p50, most := "-", "-"
		if len(d) > 0 {
			slices.Sort(d)
			p50 = d[len(d)/2].Round(10 * time.Millisecond).String()
			most = d[len(d)-1].Round(10 * time.Millisecond).String()
		}
		fmt.Fprintf(w, "| %s | %d | %d | %s | %s |\n", k, faults[k], len(d), p50, most)
	}
}

func addUpCase(w io.Writer, c *possible, all []*result) {
	var sum result
	for _, r := range all {
		sum.Events += r.Events
		sum.LostBefore += r.LostBefore
		sum.Lost += r.Lost
		sum.Duplicated += r.Duplicated
		sum.Reordered += r.Reordered
		sum.Phantoms += r.Phantoms
	}
	after := fmt.Sprint(sum.Lost)
	if !c.repaired {
		after = "-"
	}
	fmt.Fprintf(w, "| %s | %d | %d | %d | %s | %d | %d | %d |\n",
		c.what, len(all), sum.Events, sum.LostBefore, after, sum.Duplicated, sum.Reordered, sum.Phantoms)
}

func addUp(w io.Writer, what string, all []*result) {
	var sum result
	faults, failed := 0, 0
	for _, r := range all {
		faults += r.faults()
		sum.Events += r.Events
		sum.Lost += r.Lost
		sum.Duplicated += r.Duplicated
		sum.Reordered += r.Reordered
		sum.Phantoms += r.Phantoms
		if !r.ok() {
			failed++
		}
	}
	fmt.Fprintf(w, "| %s | %d | %d | %d | %d | %d | %d | %d | %d |\n", what, len(all), faults,
		sum.Events, sum.Lost, sum.Duplicated, sum.Reordered, sum.Phantoms, failed)
}
