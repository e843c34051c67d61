package catalog

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// field is a property of a schema, as rules and documents see it.
type field struct {
	path        string // "customer.email", "items[].sku"
	name        string
	schema      map[string]any
	required    bool
	pii         any // x-pii of the property or, where it is true, of one around it; nil without a mark
	description string
}

// deepest is how deep properties are listed: a schema may contain itself.
const deepest = 8

// fields lists the properties of a schema, those of references, lists and allOf included.
func (f *files) fields(n node) []field {
	w := &walk{files: f}
	w.object(n, "", false, 0)
	return w.all
}

type walk struct {
	*files
	all []field
}

// object visits the properties of an object, or of the objects in a list.
func (w *walk) object(n node, path string, pii bool, depth int) {
	n = w.follow(n)
	schema := n.object()
	if schema == nil || depth > deepest {
		return
	}
	for _, list := range []string{"allOf", "anyOf", "oneOf"} {
		parts, _ := schema[list].([]any)
		for i, part := range parts {
			w.object(n.child(part, list, fmt.Sprint(i)), path, pii, depth+1)
		}
	}
	if items, ok := schema["items"]; ok {
		w.object(n.child(items, "items"), path+"[]", pii, depth+1)
	}
	properties, _ := schema["properties"].(map[string]any)
	required := texts(schema["required"])
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		child := n.child(properties[name], "properties", name)
		w.property(child, path, name, slices.Contains(required, name), pii, depth)
	}
}

func (w *walk) property(n node, path, name string, required, pii bool, depth int) {
	if path != "" {
		path += "."
	}
	target := w.follow(n)
	one := field{path: path + name, name: name, schema: target.object(), required: required}
	one.description = cmp.Or(textOf(n.object()["description"]), textOf(target.object()["description"]))
	for _, marked := range []map[string]any{n.object(), target.object()} {
		if mark, ok := marked["x-pii"]; ok && one.pii == nil {
			one.pii = mark
		}
	}
	if pii {
		one.pii = true
	}
	known := slices.ContainsFunc(w.all, func(f field) bool { return f.path == one.path })
	if !known { // a branch of oneOf may have the same
		w.all = append(w.all, one)
	}
	w.object(target, one.path, one.pii == true, depth+1)
}

// typeText is what a property may be, as in "string or null".
func (f field) typeText() string {
	if values, ok := f.schema["enum"].([]any); ok {
		var all []string
		for _, v := range values {
			text, _ := json.Marshal(v)
			all = append(all, string(text))
		}
		return strings.Join(all, ", ")
	}
	if value, ok := f.schema["const"]; ok {
		text, _ := json.Marshal(value)
		return string(text)
	}
	all := texts(f.schema["type"])
	if one := textOf(f.schema["type"]); one != "" {
		all = []string{one}
	}
	text := strings.Join(all, " or ")
	if f.schema["anyOf"] != nil || f.schema["oneOf"] != nil {
		text = cmp.Or(text, "one of several")
	}
	text = cmp.Or(text, "any")
	if format := textOf(f.schema["format"]); format != "" {
		text += " (" + format + ")"
	}
	return text
}

func textOf(v any) string {
	s, _ := v.(string)
	return s
}

func texts(v any) (all []string) {
	list, _ := v.([]any)
	for _, item := range list {
		if s, ok := item.(string); ok {
			all = append(all, s)
		}
	}
	return all
}
