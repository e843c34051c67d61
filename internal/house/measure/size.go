package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/walpost/walpost/internal/house"
)

// size is the project as a whole.
func (c *checkout) size() (table, error) {
	t := table{
		title:   "Size",
		note:    sizeNote,
		columns: []string{"what", "lines"},
	}
	counted := map[string]int{}
	for _, p := range c.packages {
		all, long, err := lines(p.sources())
		if err != nil {
			return t, err
		}
		tests, _, err := lines(p.tests())
		if err != nil {
			return t, err
		}
		counted[p.group] += all
		counted["tests"] += tests
		if p.group == production {
			counted["long"] += long
		}
	}
	t.add("production", counted[production])
	t.add("tests", counted["tests"])
	t.add("test rigs", counted[rigs])
	t.add("demo", counted[shown])
	t.add(fmt.Sprintf("production lines over %d columns", house.MaxColumns), counted["long"])
	return t, c.readme(&t)
}

var sizeNote = fmt.Sprintf(`
Lines of Go, blank lines and comments included. Production is what %s links,
and every package outside internal/. Test rigs are the other packages below internal/. In a long line a tab
counts as four columns. A sentence of the README ends with its paragraph, list item or table row, or with
one of . ! ? before a space; code blocks are left out.`, program)

func (c *checkout) readme(t *table) error {
	text, err := os.ReadFile(filepath.Join(c.folder, "README.md"))
	if err != nil {
		return err
	}
	passages, err := house.MarkdownPassages(filepath.Join(c.folder, "README.md"))
	if err != nil {
		return err
	}
	sentences, long := 0, 0
	for _, p := range passages {
		if p.Kind == house.Code {
			continue
		}
		for _, s := range sentence.Split(p.Text, -1) {
			sentences++
			if len(strings.Fields(s)) > longSentence {
				long++
			}
		}
	}
	t.add("README", strings.Count(string(text), "\n"))
	name := fmt.Sprintf("README, sentences over %d words", longSentence)
	t.add(name, fmt.Sprintf("%d of %d", long, sentences))
	return nil
}

const longSentence = 30

// sentence matches what stands between two sentences; "e.g. " and the like hardly occur.
var sentence = regexp.MustCompile("[.!?][)\"*`]*\\s+")
