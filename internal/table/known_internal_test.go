package table

import (
	"testing"

	"github.com/walpost/walpost/outbox"
)

// TestNameOf: by what an outbox is known.
func TestNameOf(t *testing.T) {
	row := func(name string, oid uint32, at string, here bool) known {
		return known{name: name, relation: oid, table: at, here: here}
	}
	for name, c := range map[string]struct {
		given string
		rows  []known
		want  string
	}{
		"nothing is known":                       {"", nil, "public.box"},
		"nothing is known of it, and it has one": {"orders", nil, "orders"},
		"its OID":                                {"", []known{row("public.old", 7, "public.old", true)}, "public.old"},
		"its OID before its name":                {"", []known{row("public.box", 6, "", true), row("public.old", 7, "public.old", true)}, "public.old"},
		"another table":                          {"", []known{row("public.box", 6, "public.box", true)}, "public.box/2"},
		"a third table":                          {"", []known{row("public.box", 6, "", true), row("public.box/2", 8, "public.box", true)}, "public.box/3"},
		"another table, with a name":             {"orders", []known{row("orders", 6, "public.old", true)}, "orders/2"},
		"a dump":                                 {"", []known{row("public.old", 6, "public.box", false), row("public.box", 9, "", false)}, "public.old"},
		"a dump, by its name":                    {"orders", []known{row("orders", 6, "public.old", false)}, "orders"},
		"a dump of another table":                {"", []known{row("public.old", 7, "public.old", false)}, "public.box"},
		"a dump that was taken over":             {"", []known{row("public.old", 6, "public.box", true), row("public.old", 5, "public.box", false)}, "public.box"},
	} {
		box := &outbox.Table{Schema: "public", Name: "box", Given: c.given, OID: 7}
		if got, _ := nameOf(box, c.rows); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
