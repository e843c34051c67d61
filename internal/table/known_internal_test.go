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
	copied := func(name string, oid uint32, at string) known {
		k := row(name, oid, at, false)
		k.system = true
		return k
	}
	partOf := func(name, at string, root uint32) known {
		k := row(name, 6, at, true)
		k.root = root
		return k
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
		"a copy":                                 {"", []known{copied("public.old", 7, ""), row("public.box", 9, "public.box", false)}, "public.old"},
		"a dump that lacks a table":              {"", []known{row("public.box", 6, "", false)}, "public.box/2"},
		"a dump of another table":                {"", []known{row("public.old", 7, "public.old", false)}, "public.box"},
		"it has become a partition":              {"", []known{partOf("public.box", "public.box", 7)}, "public.box"},
		"it has, with another name":              {"", []known{partOf("public.box", "public.box_old", 7)}, "public.box"},
		"it has, by its table's name":            {"", []known{partOf("public.old", "public.box", 7)}, "public.old"},
		"it has, and nothing else tells it":      {"", []known{partOf("public.old", "public.box_old", 7)}, "public.old"},
		"two others have":                        {"", []known{partOf("public.old", "public.old", 7), partOf("public.other", "public.other", 7)}, "public.box"},
		"it has become one of another table":     {"", []known{partOf("public.box", "public.box_old", 8)}, "public.box/2"},
		"a dump that was taken over":             {"", []known{row("public.old", 6, "public.box", true), row("public.old", 5, "public.box", false)}, "public.box"},
	} {
		box := &outbox.Table{Schema: "public", Name: "box", Given: c.given, OID: 7}
		if got, _ := nameOf(box, c.rows); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestKeptName: which outbox a table is that was restored.
func TestKeptName(t *testing.T) {
	box := &outbox.Table{Schema: "public", Name: "box", OID: 7}
	row := func(name, at string, gone bool) known {
		return known{name: name, relation: 6, table: at, here: true, gone: gone}
	}
	for name, c := range map[string]struct {
		rows []known
		want string
	}{
		"its table was dropped":              {[]known{row("public.box", "public.box", true)}, "public.box"},
		"it had another name at first":       {[]known{row("public.old", "public.box", true)}, "public.old"},
		"the second one of the name":         {[]known{row("public.box/2", "public.box", true), row("public.box", "public.old", false)}, "public.box/2"},
		"its table is there by another name": {[]known{row("public.box", "public.old", false)}, "public.box/2"},
		"nobody has seen that it is renamed": {[]known{row("public.old", "public.box", false)}, "public.box"},
		"another condition's is there":       {[]known{row("public.old", "public.box", true), row("public.old", "public.away", false)}, "public.box"},
		"migrate down":                       {[]known{row("public.box", "", true)}, "public.box"},
	} {
		if got := keptName(box, c.rows); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
