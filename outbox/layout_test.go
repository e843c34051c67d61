package outbox_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/outbox"
)

func TestFields(t *testing.T) {
	seen := make(map[string]bool)
	for f := range outbox.NumFields {
		name := f.String()
		if name == "" || seen[name] {
			t.Errorf("field %d is called %q", f, name)
		}
		seen[name] = true
		isHeader := f >= outbox.FirstHeader && f <= outbox.LastHeader
		if got, ok := outbox.ParseField(name); ok == (isHeader || f == outbox.Status) || ok && got != f {
			t.Errorf("parse field %q: %v, %t", name, got, ok)
		}
	}
	if _, ok := outbox.ParseField("payloads"); ok {
		t.Error("an unknown field is parsed")
	}
	if got := outbox.NumFields.String(); got != "field 23" {
		t.Errorf("a field that there is not is called %q", got)
	}
}

func TestLayoutPresets(t *testing.T) {
	canonical, ok := outbox.LayoutNamed("canonical")
	if !ok || canonical.Name != "canonical" || !canonical.Records() || canonical.Has(outbox.AggregateVersion) {
		t.Errorf("canonical: %+v, %t", canonical, ok)
	}
	for _, name := range outbox.FieldNames() {
		f, _ := outbox.ParseField(name)
		if f != outbox.AggregateVersion && canonical.Columns[f] != name {
			t.Errorf("canonical column of %s is %q", f, canonical.Columns[f])
		}
	}
	debezium, ok := outbox.LayoutNamed("debezium")
	if !ok || debezium.Name != "debezium" || debezium.Records() || debezium.Columns[outbox.EventType] != "type" {
		t.Errorf("debezium: %+v, %t", debezium, ok)
	}
	if _, ok := outbox.LayoutNamed("unknown"); ok {
		t.Error("an unknown layout is found")
	}
}

func TestCustomLayout(t *testing.T) {
	l, err := outbox.CustomLayout(map[string]string{"id": "Id", "event_type": "eventType", "payload": "payload", "attempts": "tries"})
	check(t, err)
	if l.Columns[outbox.ID] != "Id" || !l.Has(outbox.Attempts) || l.Has(outbox.TraceID) || l.Records() {
		t.Errorf("%+v", l)
	}
	for want, columns := range map[string]map[string]string{
		`unknown field "ID"`:         {"ID": "id", "event_type": "t", "payload": "p"},
		`field "payload" is not`:     {"id": "id", "event_type": "t"},
		`field "event_type" is not`:  {"id": "id", "event_type": "", "payload": "p"},
		`field "id" is not mapped`:   {},
		`available_at, processed_at`: {"x": "y"},
	} {
		if _, err := outbox.CustomLayout(columns); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want %q", columns, err, want)
		}
	}
}

func TestParseTable(t *testing.T) {
	for s, want := range map[string]string{
		"outbox": `"public"."outbox"`, "app.outbox": `"app"."outbox"`, `App.Out"box`: `"App"."Out""box"`,
	} {
		schema, name, err := outbox.ParseTable(s)
		check(t, err)
		if got := (&outbox.Table{Schema: schema, Name: name}).SQL(); got != want {
			t.Errorf("parse %q: %s, want %s", s, got, want)
		}
	}
	for _, s := range []string{"", ".", "a.", ".a", "a.b.c"} {
		if schema, name, err := outbox.ParseTable(s); err == nil {
			t.Errorf("parse %q: %q, %q", s, schema, name)
		}
	}
}
