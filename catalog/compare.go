package catalog

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Compare reports what differs between the same versions of two states of a catalogue, and breaks somebody:
// consumers that know the old schema, or rows that were written under it. docs/CATALOG.md has the table of
// changes. A version that is gone is a warning. One that has problems is not gone, and neither is one whose
// file cannot be read.
func Compare(old, now *Catalog) Problems {
	var r report
	for _, before := range old.entries {
		after := now.named[before.Name][before.Version]
		if after == nil {
			if !now.unread[before.File] && !now.unread[""] {
				r.doubt(place{}, "catalog-removed",
					"keep the entry while rows or messages of it exist, also in the archive",
					"%s is gone", before)
			}
			continue
		}
		if after.compiled == nil { // which is a problem already
			continue
		}
		d := differ{old: old.files, now: now.files, seen: map[[4]string]bool{}}
		d.compare(before.schema, after.schema, "")
		for _, text := range d.found {
			r.breach(after.at(), "catalog-breaking",
				fmt.Sprintf("leave version %d as it was, and add the new shape as a version of its own",
					after.Version),
				"%s: %s", after, text)
		}
	}
	return r.problems
}

// differ compares two schemas by their keywords.
type differ struct {
	old, now *files
	seen     map[[4]string]bool // pairs of places: schemas may contain themselves
	strict   bool               // below not, if, anyOf or oneOf a new property may change what fits
	found    []string
}

func (d *differ) note(path, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if path != "" {
		text = path + ": " + text
	}
	if !slices.Contains(d.found, text) {
		d.found = append(d.found, text)
	}
}

func (d *differ) compare(old, now node, path string) {
	old, now = d.old.follow(old), d.now.follow(now)
	pair := [4]string{old.doc, old.pointer, now.doc, now.pointer}
	if d.seen[pair] {
		return
	}
	d.seen[pair] = true
	a, b := old.object(), now.object()
	if a == nil || b == nil {
		if !reflect.DeepEqual(old.schema, now.schema) {
			d.note(path, "the schema was %s, and is %s", brief(old.schema), brief(now.schema))
		}
		return
	}
	keywords := maps.Clone(a)
	maps.Copy(keywords, b)
	for _, k := range slices.Sorted(maps.Keys(keywords)) {
		d.keyword(k, old, now, path)
	}
}

// annotations do not change what fits. $defs are compared where something refers to them.
var annotations = []string{
	"$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
	"contentSchema", "default", "definitions", "deprecated", "description", "examples", "readOnly", "title",
	"writeOnly",
}

func (d *differ) keyword(k string, old, now node, path string) {
	a, b := old.object()[k], now.object()[k]
	switch {
	case slices.Contains(annotations, k) || strings.HasPrefix(k, "x-"):
	case k == "properties":
		d.properties(old, now, path)
	case k == "required":
		d.required(texts(a), texts(b), path)
	case k == "type":
		if !slices.Equal(types(a), types(b)) {
			d.note(path, "the type was %s, and is %s", brief(a), brief(b))
		}
	case k == "enum":
		d.enum(a, b, path)
	case k == "additionalProperties" && (b == nil || b == true):
		// Consumers ignore fields that they do not know.
	case a == nil || b == nil:
		d.note(path, "%s was %s, and is %s", k, brief(a), brief(b))
	default:
		d.nested(k, old.child(a, k), now.child(b, k), path)
	}
}

// applicators have a schema as their value; lists and maps have several.
var (
	applicators = []string{
		"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
		"unevaluatedItems", "unevaluatedProperties",
	}
	lists    = []string{"allOf", "anyOf", "oneOf", "prefixItems"}
	mappings = []string{"dependentSchemas", "patternProperties"}
	choosing = []string{"anyOf", "else", "if", "not", "oneOf", "then"}
)

func (d *differ) nested(k string, old, now node, path string) {
	if slices.Contains(choosing, k) && !d.strict {
		d.strict = true
		defer func() { d.strict = false }()
	}
	if k == "items" {
		path += "[]"
	}
	switch {
	case slices.Contains(applicators, k):
		d.compare(old, now, path)
	case slices.Contains(lists, k), slices.Contains(mappings, k):
		d.parts(k, old, now, path)
	case !sameValue(old.schema, now.schema):
		d.note(path, "%s was %s, and is %s", k, brief(old.schema), brief(now.schema))
	}
}

func (d *differ) parts(k string, old, now node, path string) {
	keys := func(n node) (all []string) {
		list, _ := n.schema.([]any)
		for i := range list {
			all = append(all, fmt.Sprint(i))
		}
		return append(all, slices.Sorted(maps.Keys(n.object()))...)
	}
	a, b := keys(old), keys(now)
	if !slices.Equal(a, b) {
		d.note(path, "%s has other parts", k)
		return
	}
	for _, key := range a {
		x, _ := old.step(key)
		y, _ := now.step(key)
		d.compare(x, y, path)
	}
}

func (d *differ) properties(old, now node, path string) {
	a, _ := old.object()["properties"].(map[string]any)
	b, _ := now.object()["properties"].(map[string]any)
	if path != "" {
		path += "."
	}
	for _, name := range slices.Sorted(maps.Keys(a)) {
		if _, ok := b[name]; !ok {
			d.note("", "property %s%s is gone", path, name)
			continue
		}
		d.compare(old.child(a[name], "properties", name), now.child(b[name], "properties", name), path+name)
	}
	for _, name := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[name]; !ok && d.strict {
			d.note("", "property %s%s is new where the schema chooses between shapes", path, name)
		}
	}
}

func (d *differ) required(old, now []string, path string) {
	for _, name := range old {
		if !slices.Contains(now, name) {
			d.note(path, "%s was required, and is optional: consumers rely on it", name)
		}
	}
	for _, name := range now {
		if !slices.Contains(old, name) {
			d.note(path, "%s is required now: rows that were written before may lack it", name)
		}
	}
}

func (d *differ) enum(old, now any, path string) {
	a, _ := old.([]any)
	b, _ := now.([]any)
	if a == nil || b == nil {
		d.note(path, "enum was %s, and is %s", brief(old), brief(now))
		return
	}
	has := func(list []any, v any) bool {
		return slices.ContainsFunc(list, func(other any) bool { return sameValue(v, other) })
	}
	for _, v := range a {
		if !has(b, v) {
			d.note(path, "%s is gone from enum: rows that were written before may have it", brief(v))
		}
	}
	for _, v := range b {
		if !has(a, v) {
			d.note(path, "%s is new in enum: consumers do not know it", brief(v))
		}
	}
}

// types are those of the keyword in any order.
func types(v any) []string {
	if one, ok := v.(string); ok {
		return []string{one}
	}
	all := texts(v)
	slices.Sort(all)
	return all
}

func sameValue(a, b any) bool { return reflect.DeepEqual(a, b) }

func brief(v any) string {
	if v == nil {
		return "not there"
	}
	text, err := json.Marshal(v)
	if err != nil {
		return "something else"
	}
	return cut(string(text), 60)
}
