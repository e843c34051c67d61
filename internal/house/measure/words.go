package main

import "github.com/walpost/walpost/internal/house"

// words are the words that the house does not use any more.
func (c *checkout) words() (table, error) {
	t := table{
		title: "Words",
		note: `
Words that are forbidden (internal/house.Words), and how often they stand in comments, string literals
and declared names of Go files, tests included, and in documents.`,
		columns: []string{"word", "comments", "strings", "names", "documents"},
	}
	passages, err := c.passages()
	for i, of := range house.Find(house.Words, passages) {
		found := map[house.Kind]int{}
		for _, p := range of {
			found[p.Kind]++
		}
		not := house.Words[i].Not
		t.add(not, found[house.Comment], found[house.Text], found[house.Name], found[house.Document])
	}
	return t, err
}

func (c *checkout) passages() (all []house.Passage, err error) {
	for _, p := range c.packages {
		if p.room == "internal/house" { // it has to name the words
			continue
		}
		for _, file := range append(p.sources(), p.tests()...) {
			passages, err := house.GoPassages(file)
			if err != nil {
				return nil, err
			}
			all = append(all, passages...)
		}
	}
	documents, err := house.Documents(c.folder)
	if err != nil {
		return nil, err
	}
	for _, file := range documents {
		passages, err := house.MarkdownPassages(file)
		if err != nil {
			return nil, err
		}
		all = append(all, passages...)
	}
	return all, nil
}
