package catalog

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// ambiguous contains itself in four alternatives, told in a document's own words below another.
const ambiguous = `{"anyOf": [{"type": "object"}, {"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}},
	{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}}]}`

// entryOf has a schema.
func entryOf(t *testing.T, schema string) (*Entry, *reader) {
	t.Helper()
	r := &reader{files: newFiles(nil, catalogURL)}
	r.readText("orders.yaml", []byte("name: order.placed\nversion: 1\nowner: shop\ndescription: d\nreplay: safe\nschema: "+schema))
	if len(r.problems) > 0 {
		t.Fatal(r.problems)
	}
	return r.entries[0], r
}

func brackets(depth int) string {
	return strings.Repeat("[", depth) + "1" + strings.Repeat("]", depth)
}

// TestChecksEnd: what a payload of a few bytes may cost is bounded, in every form of schema that contains itself.
func TestChecksEnd(t *testing.T) {
	for name, schema := range map[string]string{
		"anyOf":       ambiguous,
		"oneOf":       strings.Replace(ambiguous, "anyOf", "oneOf", 1),
		"below not":   `{"type": "array", "items": {"not": ` + strings.ReplaceAll(ambiguous, `"#"`, `"#/items/not"`) + `}}`,
		"dynamicRef":  strings.ReplaceAll(strings.Replace(ambiguous, "{", `{"$dynamicAnchor": "self", `, 1), `"$ref": "#"`, `"$dynamicRef": "#self"`),
		"draft 7":     strings.Replace(ambiguous, "{", `{"$schema": "http://json-schema.org/draft-07/schema#", `, 1),
		"in a format": strings.Replace(ambiguous, "{", `{"$schema": "http://json-schema.org/draft-07/schema#", "format": "email", `, 1),
		"by name": `{"properties": {"a": {"$ref": "#"}}, "patternProperties": {"^a": {"$ref": "#"}, "a$": {"$ref": "#"}, ".": {"$ref": "#"}},
			"type": "object"}`,
	} {
		t.Run(name, func(t *testing.T) {
			e, _ := entryOf(t, schema)
			for _, depth := range []int{24, 90} {
				payload := brackets(depth)
				if name == "by name" {
					payload = strings.Repeat(`{"a": `, depth) + "1" + strings.Repeat("}", depth)
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				faults := check(e.compiled, []byte(payload))
				runtime.ReadMemStats(&after)
				if !strings.Contains(fmt.Sprint(faults), "steps to check") {
					t.Errorf("depth %d: %v", depth, faults)
				}
				if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; mb > 100 {
					t.Errorf("depth %d: %d MB were allocated", depth, mb)
				}
			}
		})
	}
}

// TestChecksOfLargePayloads: a payload of many values fits its schema, and the faults of one are told.
func TestChecksOfLargePayloads(t *testing.T) {
	e, _ := entryOf(t, `{"type": "array", "items": {"allOf": [{"$ref": "#/$defs/n"}, {"type": "integer"}]}, "$defs": {"n": {"type": "number"}}}`)
	const values = 99_000
	fits := "[" + strings.Repeat("1,", values) + "1]"
	if faults := check(e.compiled, []byte(fits)); len(faults) > 0 {
		t.Errorf("a payload of %d values: %v", values, faults)
	}
	faults := check(e.compiled, []byte("["+strings.Repeat("1,", 2000)+`"x"]`))
	if len(faults) == 0 || faults[0].Path != "/2000" {
		t.Errorf("the faults are %v, want one at /2000", faults)
	}
	if faults := check(e.compiled, []byte(strings.Replace(fits, "1]", `"x"]`, 1))); len(faults) != 1 {
		t.Errorf("the faults are %v, want one", faults)
	}
}

// TestAlternatives: `walpost catalog check` warns of schemas that take many steps, and of no others.
func TestAlternatives(t *testing.T) {
	for schema, want := range map[string]int{
		ambiguous: 4,
		`{"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "integer"}]}`:       1,
		`{"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}`: 0,
		`{"allOf": [{"if": {"required": ["a"]}, "then": {"properties": {"a": {"$ref": "#"}}}},
			{"if": {"required": ["b"]}, "then": {"properties": {"b": {"$ref": "#"}}}}]}`: 0,
		strings.ReplaceAll(strings.Replace(ambiguous, "{", `{"$dynamicAnchor": "self", `, 1), `"$ref": "#"`, `"$dynamicRef": "#self"`): 4,
	} {
		e, r := entryOf(t, schema)
		if got := e.compiled.alternatives(); got != want {
			t.Errorf("%s: %d alternatives, want %d", schema, got, want)
		}
		e.checkRules(r.files, &r.report)
		if warned := strings.Contains(r.problems.Error(), "alternatives"); warned != (want > 1) {
			t.Errorf("%s: %v", schema, r.problems)
		}
	}
}
