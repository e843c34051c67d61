package house

import (
	"regexp"
	"strings"
)

// Word is a word or a phrase that the project does not use, and what it says instead.
type Word struct {
	Not string // lower case; a space stands for any white space, a bar for "or"
	Say string
}

// Words grows: a word enters it in the change that removes the word from the project.
var Words = []Word{
	{Not: "anew", Say: "again; recreate"},
	{Not: "complain", Say: "report"},
	{Not: "lanes?", Say: "publisher"},
	{Not: "laws? [0-9]+", Say: "the guarantee itself"},
	{Not: "say limits|sayLimits", Say: "warn about limits"},
	{Not: "settlers?", Say: "marker"},
	{Not: "singly", Say: "one by one"},
	{Not: "tenures?", Say: "term"},
}

// Find returns the passages that hold each word. A passage is there as often as it holds the word.
func Find(words []Word, passages []Passage) [][]Passage {
	var nots []string
	found := make([][]Passage, len(words))
	for _, w := range words {
		nots = append(nots, w.Not)
	}
	some := pattern(strings.Join(nots, "|"))
	for _, p := range passages {
		if !some.MatchString(p.Text) {
			continue
		}
		for i, not := range nots {
			for range pattern(not).FindAllString(p.Text, -1) {
				found[i] = append(found[i], p)
			}
		}
	}
	return found
}

func pattern(not string) *regexp.Regexp { return regexp.MustCompile(`(?i)\b(?:` + not + `)\b`) }
