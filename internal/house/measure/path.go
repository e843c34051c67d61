package main

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
)

const pathNote = `
The relay has its defaults and streams. Each row comes alone, in a transaction. The link to NATS is paused
until the relay has sent the row: what runs until then leads from the WAL byte to the PubAck. What runs from
there until the row is marked leads from the PubAck to the confirmed LSN. A function counts, helpers included,
where some of its code runs more often in nine of ten rounds with a row than in half of the rounds without.
So the standby status does not count: it goes out on a ticker. Entries are the functions that are exported or
used in another file of their package: there a reader changes the file.`

// passage are the functions of production that a row passes before its PubAck and after it.
type passage struct{ before, after functions }

func (p passage) summary() table {
	t := table{
		title: "The path of a row", note: pathNote,
		columns: []string{"from", "functions", "entries", "files", "packages"},
	}
	t.add("WAL byte to PubAck", p.before.count()...)
	t.add("PubAck to confirmed LSN", p.after.count()...)
	t.add("both, each once", p.all().count()...)
	return t
}

func (p passage) all() functions { return append(p.before.minus(p.after), p.after...) }

// names are the functions by file.
func (p passage) names() table {
	t := table{
		title: "The functions of the path", note: "By file.",
		columns: []string{"file", "to the PubAck", "to the confirmed LSN"},
	}
	for _, file := range p.all().files() {
		t.add(file, p.before.in(file), p.after.in(file))
	}
	return t
}

type function struct {
	file, name string // the file with its room
	entry      bool   // exported, or used in another file of its package
}

type functions []function

func (fs functions) count() []any {
	var rooms []string
	for _, file := range fs.files() {
		rooms = append(rooms, path.Dir(file))
	}
	entries := slices.DeleteFunc(slices.Clone(fs), func(f function) bool { return !f.entry })
	return []any{len(fs), len(entries), len(fs.files()), len(slices.Compact(rooms))}
}

func (fs functions) files() (files []string) {
	for _, f := range fs {
		files = append(files, f.file)
	}
	slices.Sort(files)
	return slices.Compact(files)
}

func (fs functions) minus(others functions) functions {
	return slices.DeleteFunc(slices.Clone(fs), func(f function) bool { return slices.Contains(others, f) })
}

func (fs functions) in(file string) string {
	var names []string
	for _, f := range fs {
		if f.file == file {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, ", ")
}

// rowsSent is how many rows are sent, and how many times nothing is sent for as long.
const rowsSent = 30

// passed runs the relay and compares what runs with rows and without.
func (c *checkout) passed(ctx context.Context) (p passage, err error) {
	var r relay
	defer r.stop()
	if err := r.start(ctx, c); err != nil {
		return p, fmt.Errorf("start relay: %w", err)
	}
	var rows, idle rounds
	for range rowsSent {
		if err := r.round(ctx, func() error { return nil }, &idle); err != nil {
			return p, err
		}
		if err := r.round(ctx, func() error { return r.insert(ctx) }, &rows); err != nil {
			return p, err
		}
	}
	p.before = c.functions(rows.before, idle.before)
	p.after = c.functions(rows.after, idle.after)
	return p, nil
}
