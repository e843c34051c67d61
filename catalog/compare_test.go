package catalog_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/catalog"
)

const compared = `name: order.placed
version: 1
owner: shop
description: d
replay: safe
schema:
  type: object
  required: [total]
  properties:
    total: {type: integer, minimum: 0}
    state: {enum: [new, paid]}
    note: {type: [string, 'null'], maxLength: 10}
    items: {type: array, items: {$ref: '#/$defs/item'}}
    way: {oneOf: [{type: object, properties: {a: {type: string}}}, {type: string}]}
  $defs: {item: {type: object, properties: {sku: {type: string}, of: {$ref: '#/$defs/item'}}}}
`

// TestBreakingChanges is the table of docs/CATALOG.md.
func TestBreakingChanges(t *testing.T) {
	for _, tt := range []struct{ name, old, now, want string }{
		{"nothing", "", "", ""},
		{"description", "description: d", "description: other", ""},
		{"annotation", "minimum: 0", "minimum: 0, x-pii: true, description: d, examples: [1]", ""},
		{"optional property", "{enum: [new, paid]}", "{enum: [new, paid]}\n    more: {type: string}", ""},
		{"order of types", "[string, 'null']", "['null', string]", ""},
		{"opened", "  required: [total]", "  additionalProperties: true\n  required: [total]", ""},
		{"unused def", "$defs: {item:", "$defs: {other: {type: string}, item:", ""},

		{"property gone", "    state: {enum: [new, paid]}\n", "", "property state is gone"},
		{"property renamed", "note:", "remark:", "property note is gone"},
		{"type", "total: {type: integer", "total: {type: number", `total: the type was "integer", and is "number"`},
		{"type gone", "total: {type: integer, ", "total: {", `total: the type was "integer", and is not there`},
		{"nullable", "[string, 'null']", "string", `note: the type was ["string","null"], and is "string"`},
		{"optional", "  required: [total]\n", "", "total was required, and is optional"},
		{"required", "[total]", "[total, state]", "state is required now"},
		{"value gone", "[new, paid]", "[new]", `state: "paid" is gone from enum`},
		{"value new", "[new, paid]", "[new, paid, sent]", `state: "sent" is new in enum`},
		{"enum gone", "{enum: [new, paid]}", "{type: string}", `state: enum was ["new","paid"], and is not there; state: the type was not there`},
		{"limit", "minimum: 0", "minimum: 1", "total: minimum was 0, and is 1"},
		{"limit gone", ", maxLength: 10", "", "note: maxLength was 10, and is not there"},
		{"limit new", "minimum: 0", "minimum: 0, maximum: 5", "total: maximum was not there, and is 5"},
		{"format new", "sku: {type: string}", "sku: {type: string, format: uuid}", `items[].sku: format was not there, and is "uuid"`},
		{"closed", "  required: [total]", "  additionalProperties: false\n  required: [total]", "additionalProperties was not there, and is false"},
		{"behind a reference", "sku: {type: string}", "sku: {type: integer}", `items[].sku: the type was "string", and is "integer"`},
		{"in a list", "{type: array, items: {$ref: '#/$defs/item'}}", "{type: array, items: {type: string}}", `items[]: properties`},
		{"choice", "{type: string}]}", "{type: integer}]}", `way: the type was "string", and is "integer"`},
		{"choices", ", {type: string}]}", "]}", "way: oneOf has other parts"},
		{"property of a choice", "{a: {type: string}}", "{a: {type: string}, b: {type: string}}", "property way.b is new where the schema chooses"},
		{"no schema", compared[strings.Index(compared, "schema:"):], "schema: true\n", "the schema was {"},
		{"version gone", "version: 1", "version: 2", "order.placed version 1 is gone"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := compared
			if tt.old != "" {
				if now = strings.Replace(compared, tt.old, tt.now, 1); now == compared {
					t.Fatalf("%q is not in the entry", tt.old)
				}
			}
			var got []string
			for _, p := range catalog.Compare(load(t, "a.yaml", compared), load(t, "b.yaml", now)) {
				got = append(got, strings.TrimPrefix(p.Text, "order.placed version 1: "))
				if breaks := p.Level == catalog.Error; breaks != (tt.name != "version gone") || p.Fix == "" {
					t.Errorf("%+v", p)
				}
			}
			text := strings.Join(got, "; ")
			if tt.want == "" && text != "" || !strings.HasPrefix(text, tt.want) && tt.name != "in a list" ||
				tt.name == "in a list" && !strings.Contains(text, "items[]") {
				t.Errorf("got %q, want %q", text, tt.want)
			}
		})
	}
}

// TestWhatIsGone: an entry with a problem is there, and its schema is compared. An entry that is gone may be in a
// file that cannot be read.
func TestWhatIsGone(t *testing.T) {
	paid := strings.Replace(compared, "order.placed", "order.paid", 1)
	old := load(t, "a.yaml", compared, "b.yaml", paid)
	for _, tt := range []struct{ name, now, want string }{
		{"no owner", strings.Replace(compared, "owner: shop\n", "", 1), ""},
		{"unknown key", "ower: shop\n" + compared, ""},
		{"another owner", compared + "---\n" + strings.Replace(strings.Replace(compared, "shop", "billing", 1), "version: 1", "version: 2", 1), ""},
		{"no schema", compared[:strings.Index(compared, "schema:")], ""},
		{"bad schema", strings.Replace(compared, "minimum: 0", "minimum: x", 1), ""},
		{"no name", strings.Replace(compared, "name: order.placed\n", "", 1), ""},
		{"bad version", strings.Replace(compared, "version: 1", "version: one", 1), ""},
		{"not YAML", compared + "---\n[", ""},
		{"breaking, no owner", strings.Replace(strings.Replace(compared, "owner: shop\n", "", 1), "minimum: 0", "minimum: 1", 1), "catalog-breaking"},
		{"gone, and another one has no owner", strings.Replace(strings.Replace(compared, "owner: shop\n", "", 1), "order.placed", "order.sent", 1), "catalog-removed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now, problems := catalog.Check(files("a.yaml", tt.now, "b.yaml", paid))
			if problems.Errors() == 0 {
				t.Error("the catalogue has no problem")
			}
			var got []string
			for _, p := range catalog.Compare(old, now) {
				got = append(got, p.Code)
			}
			if strings.Join(got, " ") != tt.want {
				t.Errorf("compared: %q, want %q", got, tt.want)
			}
		})
	}
}
