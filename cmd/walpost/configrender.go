package main

import (
	"fmt"
	"strings"
)

// renderYAML writes the keys as a configuration file. above gives the comment lines over a key, text its
// value.
func renderYAML(keys []key, above func(key) []string, text func(key) string) string {
	var b strings.Builder
	var open []string // the sections that the previous key stood in
	for _, k := range keys {
		path := strings.Split(k.name, ".")
		sections, leaf := path[:len(path)-1], path[len(path)-1]
		same := commonPrefix(open, sections)
		if same == 0 && b.Len() > 0 {
			b.WriteByte('\n')
		}
		indent, item := openSections(&b, sections, same)
		for _, line := range above(k) {
			fmt.Fprintf(&b, "%s# %s\n", indent, line)
		}
		if item {
			indent = indent[:len(indent)-2] + "- "
		}
		fmt.Fprintf(&b, "%s%s: %s\n", indent, leaf, text(k))
		open = sections
	}
	return b.String()
}

func commonPrefix(a, b []string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// openSections writes the headings from the section number same on. It returns the indentation of the keys in
// the last of them, and whether the next key opens an item of a list.
func openSections(b *strings.Builder, sections []string, same int) (indent string, item bool) {
	for i, s := range sections {
		name, index, isList := strings.Cut(s, "[")
		if i >= same {
			item = isList
			if !isList || index == "0]" {
				fmt.Fprintf(b, "%s%s:\n", indent, name)
			}
		}
		indent += "  "
		if isList {
			indent += "  "
		}
	}
	return indent, item
}

// exampleYAML is the documentation of the configuration: every key with its help and its default.
func exampleYAML() string {
	above := func(k key) []string {
		lines := wrap(k.help, 96)
		kind := k.Kind()
		if _, plain := k.value.(stringValue); plain {
			kind = ""
		}
		lines = append(lines, strings.TrimSpace("["+k.env+"] "+kind))
		return lines
	}
	return "# The configuration of walpost: every key with its default.\n" +
		"# A flag goes before an environment variable (in brackets), that before this file, " +
		"that before the default.\n\n" +
		renderYAML(defaultConfig().keys(), above, func(k key) string { return yamlText(k, k.String()) })
}

// effectiveYAML is the configuration as it is in force, each value with its origin, without secrets.
func effectiveYAML(l *loader) string {
	none := func(key) []string { return nil }
	return renderYAML(l.cfg.keys(), none, func(k key) string {
		origin := l.origin[k.name]
		if origin == "" {
			origin = "default"
		}
		return yamlText(k, redacted(k.value)) + "  # " + origin
	})
}

func yamlText(k key, text string) string {
	switch v := k.value.(type) {
	case boolValue, intValue:
		return text
	case nodeValue:
		if v.isNode() {
			return text
		}
	case layoutValue:
		if v.p.Columns != nil {
			return text
		}
	}
	return scalar(text)
}

// wrap breaks a text into lines of at most width bytes.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
