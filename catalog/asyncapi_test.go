package catalog

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"testing"
	"testing/fstest"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// asyncAPISchema is the official schema of AsyncAPI 3.0.0, as the npm package @asyncapi/specs 6.11.1 has it.
const asyncAPISchema = "testdata/asyncapi/3.0.0.json.gz"

func officialSchema(t *testing.T) *budgeted {
	t.Helper()
	file, err := os.Open(asyncAPISchema)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	text, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(text)
	if err != nil {
		t.Fatal(err)
	}
	f := newFiles(nil, catalogURL)
	f.docs[catalogURL+"asyncapi.json"] = doc
	schema, err := f.compile(catalogURL + "asyncapi.json")
	if err != nil {
		t.Fatal(err)
	}
	return schema
}

// TestAsyncAPIFitsTheOfficialSchema, and the schema refuses a document with an action that AsyncAPI lacks.
func TestAsyncAPIFitsTheOfficialSchema(t *testing.T) {
	official := officialSchema(t)
	const text = `{"name": "order.placed", "version": 1, "owner": "shop", "description": "d", "replay": "unsafe",
		"replay_note": "n", "consumers": ["billing"], "schema": {"type": "object", "properties": {
		"total": {"$ref": "#/$defs/cents"}, "nested": {"$ref": "a/b.json"}}, "$defs": {"cents": {"type": "integer"}}}}`
	c, err := Load(fstest.MapFS{"a.yaml": {Data: []byte(text)}, "a/b.json": {Data: []byte(`{"type": "string"}`)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{"events.{event_type}", "{partition/8}.{tenant_id}.events"} {
		for _, enveloped := range []bool{false, true} {
			text, err := c.AsyncAPI(AsyncAPIOptions{Subject: subject, Enveloped: enveloped})
			if err != nil {
				t.Fatal(err)
			}
			if faults := official.check(fromYAML(t, text), size{values: MaxValues}); len(faults) > 0 {
				t.Errorf("%s: %v\n%s", subject, faults, text)
			}
			broken := bytes.Replace(text, []byte("action: send"), []byte("action: relay"), 1)
			if len(official.check(fromYAML(t, broken), size{values: MaxValues})) == 0 {
				t.Error("the official schema accepts the action relay")
			}
		}
	}
}

func fromYAML(t *testing.T, text []byte) any {
	t.Helper()
	var doc any
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
	if err != nil {
		t.Fatal(err)
	}
	return value
}
