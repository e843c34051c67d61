package house

import "regexp"

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

// Find returns the passages that hold the word.
func (w Word) Find(passages []Passage) (found []Passage) {
	pattern := regexp.MustCompile(`(?i)\b(?:` + w.Not + `)\b`)
	for _, p := range passages {
		for range pattern.FindAllString(p.Text, -1) {
			found = append(found, p)
		}
	}
	return found
}
