package site

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html"
	"slices"
	"strings"
)

// groups are the pages in the order of the navigation. A page that is in none of them is in the last one.
var groups = []struct {
	title string
	pages []string
}{
	{"Start", []string{"README.md", "docs/GUARANTEES.md", "docs/COMPARISON.md"}},
	{"Applications", []string{
		"docs/EVENTS.md", "docs/TABLES.md", "docs/CATALOG.md", "docs/CONSUME.md", "docs/IDEMPOTENCY.md",
		"docs/REPLAY.md",
		"examples/insert/README.md", "examples/consume/README.md", "examples/shop/README.md",
	}},
	{"Operation", []string{
		"docs/OPERATIONS.md", "docs/CONSOLE.md", "docs/SCALE.md",
		"docs/CONFIGURATION.md", "docs/METRICS.md", "docs/ALARMS.md", "docs/MANAGED.md",
		"deploy/README.md", "docs/SECURITY.md",
	}},
	{"Project", []string{
		"docs/ARCHITECTURE.md", "docs/BENCHMARKS.md", "docs/CHAOS.md", "CONTRIBUTING.md", "docs/RELEASING.md",
		"CHANGELOG.md",
	}},
}

// place is the group of a page, and its place there.
func place(source string) (group, n int) {
	for i, g := range groups {
		if n := slices.Index(g.pages, source); n >= 0 {
			return i, n
		}
	}
	last := len(groups) - 1
	return last, len(groups[last].pages)
}

func inOrder(a, b *page) int {
	groupA, a1 := place(a.source)
	groupB, b1 := place(b.source)
	return cmp.Or(cmp.Compare(groupA, groupB), cmp.Compare(a1, b1), cmp.Compare(a.source, b.source))
}

// label is the page's name in the navigation.
func (p *page) label() string {
	if p.source == "README.md" {
		return "Overview"
	}
	return p.title
}

// fill puts page i into the layout.
func (s *Site) fill(layout string, pages []*page, i int) []byte {
	p := pages[i]
	title := p.title
	if title != "walpost" {
		title += " - walpost"
	}
	version := html.EscapeString(s.version)
	return []byte(strings.NewReplacer(
		"{{policy}}", policy,
		"{{title}}", html.EscapeString(title),
		"{{version}}", version,
		"{{revision}}", html.EscapeString(s.revision),
		"{{source}}", html.EscapeString(repository+s.ref()+"/"+p.source),
		"{{path}}", html.EscapeString(p.source),
		"{{navigation}}", navigation(pages, p),
		"{{neighbours}}", neighbours(pages, i),
		"{{body}}", string(p.body),
	).Replace(layout))
}

// navigation lists all pages. Those that are not current show their chapters when they are unfolded.
func navigation(pages []*page, current *page) string {
	var b strings.Builder
	group := -1
	for _, p := range pages {
		if g, _ := place(p.source); g != group {
			group = g
			fmt.Fprintf(&b, "<h2>%s</h2>\n", groups[g].title)
		}
		open, mark, deepest := "", "", 2
		if p == current {
			open, mark, deepest = " open", ` aria-current="page"`, 3
		}
		fmt.Fprintf(&b, "<details%s><summary><a href=\"%s\"%s>%s</a></summary>\n<ul>\n",
			open, p.file, mark, html.EscapeString(p.label()))
		for _, h := range p.headings {
			if h.level > 1 && h.level <= deepest {
				fmt.Fprintf(&b, "<li class=\"level%d\"><a href=\"%s#%s\">%s</a></li>\n",
					h.level, p.file, html.EscapeString(h.id), html.EscapeString(h.text))
			}
		}
		b.WriteString("</ul></details>\n")
	}
	return b.String()
}

// neighbours are links to the pages before and after page i.
func neighbours(pages []*page, i int) string {
	var b strings.Builder
	link := func(rel, format string, to *page) {
		text := fmt.Sprintf(format, html.EscapeString(to.label()))
		fmt.Fprintf(&b, "<a rel=\"%s\" href=\"%s\">%s</a>\n", rel, to.file, text)
	}
	if i > 0 {
		link("prev", "← %s", pages[i-1])
	}
	if i+1 < len(pages) {
		link("next", "%s →", pages[i+1])
	}
	return b.String()
}

// searchIndex is the text of all sections as a script: a page that is opened as a file cannot fetch JSON.
func searchIndex(pages []*page) ([]byte, error) {
	var all [][4]string
	for _, p := range pages {
		for _, s := range p.sections {
			words := strings.Join(strings.Fields(s.words), " ")
			all = append(all, [4]string{p.file + "#" + s.id, p.label(), s.text, words})
		}
	}
	index, err := json.Marshal(all)
	return slices.Concat([]byte("window.walpostSections = "), index, []byte(";\n")), err
}
