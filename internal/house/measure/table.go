package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// table is a Markdown table with a note on how its figures are obtained. Its first column is each row's name.
type table struct {
	title   string
	note    string
	columns []string
	rows    []row
}

type row struct {
	name  string
	cells []string
}

func (t *table) add(name string, cells ...any) {
	r := row{name: name}
	for _, c := range cells {
		r.cells = append(r.cells, fmt.Sprint(c))
	}
	t.rows = append(t.rows, r)
}

func (t *table) find(name string) []string {
	for _, r := range t.rows {
		if r.name == name {
			return r.cells
		}
	}
	return nil
}

func (t *table) print(w io.Writer) {
	fmt.Fprintf(w, "## %s\n\n%s\n\n", t.title, strings.TrimSpace(t.note))
	fmt.Fprintf(w, "| %s |\n", strings.Join(t.columns, " | "))
	fmt.Fprintf(w, "| --- |%s\n", strings.Repeat(" ---: |", len(t.columns)-1))
	for _, r := range t.rows {
		name := strings.ReplaceAll(r.name, "|", `\|`)
		fmt.Fprintf(w, "| %s | %s |\n", name, strings.Join(r.cells, " | "))
	}
	fmt.Fprintln(w)
}

// merge puts the same tables of several checkouts into one each.
func merge(checkouts [][]table) (merged []table) {
	for i, first := range checkouts[0] {
		var same []table
		for _, tables := range checkouts {
			same = append(same, tables[i])
		}
		first.rows = mergeRows(same)
		merged = append(merged, first)
	}
	return merged
}

func mergeRows(same []table) (rows []row) {
	var names []string
	for _, t := range same {
		for _, r := range t.rows {
			if !slices.Contains(names, r.name) {
				names = append(names, r.name)
			}
		}
	}
	for _, name := range names {
		r := row{name: name}
		for column := range len(same[0].columns) - 1 {
			var figures []string
			for _, t := range same {
				figures = append(figures, figure(t.find(name), column))
			}
			r.cells = append(r.cells, strings.Join(slices.Compact(figures), " → "))
		}
		rows = append(rows, r)
	}
	return rows
}

// figure is a dash where a checkout has no such row.
func figure(cells []string, column int) string {
	if column >= len(cells) {
		return "-"
	}
	return cells[column]
}
