package catalog_test

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/catalog"
)

func documented(t *testing.T) *catalog.Catalog {
	t.Helper()
	return load(t, "b.yaml", edit(t, "order.placed", "order.paid"), "a.yaml",
		edit(t, "{type: integer, minimum: 0}", "{$ref: 'common/money.json#/$defs/a b'}"),
		"c.yaml", edit(t, "version: 1", "version: 2"),
		"common/money.json", `{"$defs": {"a b": {"type": "integer", "maximum": 100000000000000000000}}}`)
}

func TestMarkdown(t *testing.T) {
	page := string(documented(t).Markdown())
	for _, want := range []string{
		"| [`order.paid`](#orderpaid-version-1) | 1 | shop | billing | safe | yes |\n| [`order.placed`](#orderplaced-version-1) | 1 |",
		"\n## `order.placed` version 2\n\nA customer has placed an order.\n",
		"| `currency` | \"EUR\", \"USD\" | yes | no |  |\n| `email` | string | no | yes |  |\n| `items` | array | no | no |  |\n| `items[].sku` | string | yes | no |  |\n| `total` | integer | yes | no |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	if page != string(documented(t).Markdown()) {
		t.Error("the page differs from one time to the next")
	}
}

// TestAsyncAPI: every reference leads somewhere, numbers keep their digits, and channels follow the template.
func TestAsyncAPI(t *testing.T) {
	for subject, want := range map[string][]string{
		"events.{event_type}":             {"channels.order.placed.address=events.order.placed", "channels.order.paid.messages.order.paid.v1"},
		"{partition/8}.{tenant_id}.order": {"channels.events.address={partition}.{tenant_id}.order", "channels.events.messages.order.paid.v1", "channels.events.parameters.partition", "channels.events.parameters.tenant_id"},
	} {
		for _, enveloped := range []bool{false, true} {
			o := catalog.AsyncAPIOptions{Subject: subject, Enveloped: enveloped}
			text, err := documented(t).AsyncAPI(o)
			if err != nil {
				t.Fatal(err)
			}
			again, err := documented(t).AsyncAPI(o)
			if err != nil || string(text) != string(again) {
				t.Errorf("the document differs from one time to the next: %v", err)
			}
			if !strings.Contains(string(text), "maximum: 100000000000000000000\n") {
				t.Error("a number has lost its digits")
			}
			var doc map[string]any
			if err := yaml.Unmarshal(text, &doc); err != nil {
				t.Fatal(err)
			}
			found := map[string]bool{}
			refs := leads(t, doc, doc, "", found)
			if refs < 10 {
				t.Errorf("only %d references", refs)
			}
			for _, w := range want {
				if !found[w] {
					t.Errorf("%s: no %s", subject, w)
				}
			}
		}
	}
}

// leads follows each $ref from the root, and notes every path.
func leads(t *testing.T, root, v any, path string, found map[string]bool) (refs int) {
	t.Helper()
	found[strings.TrimPrefix(path, ".")] = true
	switch v := v.(type) {
	case map[string]any:
		for k, value := range v {
			if ref, ok := value.(string); ok && k == "$ref" {
				refs++
				if !exists(root, ref) {
					t.Errorf("%s: %s leads nowhere", path, ref)
				}
				continue
			}
			refs += leads(t, root, value, path+"."+k, found)
		}
	case []any:
		for _, value := range v {
			refs += leads(t, root, value, path, found)
		}
	case string:
		found[strings.TrimPrefix(path, ".")+"="+v] = true
	}
	return refs
}

func exists(v any, ref string) bool {
	rest, ok := strings.CutPrefix(ref, "#/")
	for _, token := range strings.Split(rest, "/") {
		object, isObject := v.(map[string]any)
		if !isObject {
			return false
		}
		if v, ok = object[strings.NewReplacer("~1", "/", "~0", "~", "%20", " ").Replace(token)]; !ok {
			return false
		}
	}
	return ok
}
