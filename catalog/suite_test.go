package catalog

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// suite is a copy of https://github.com/json-schema-org/JSON-Schema-Test-Suite: the required cases of 2020-12.
const suite = "testdata/JSON-Schema-Test-Suite"

type suiteGroup struct {
	Description string
	Schema      json.RawMessage
	Tests       []struct {
		Description string
		Data        json.RawMessage
		Valid       bool
	}
}

// TestSuiteOfJSONSchema: every required case, by the way that schemas and payloads of a catalogue take. The
// suite's server is a catalogue of files.
func TestSuiteOfJSONSchema(t *testing.T) {
	paths, err := filepath.Glob(suite + "/tests/draft2020-12/*.json")
	if err != nil || len(paths) < 40 {
		t.Fatalf("found %d files: %v", len(paths), err)
	}
	cases := 0
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".json")
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var groups []suiteGroup
		if err := json.Unmarshal(text, &groups); err != nil {
			t.Fatal(err)
		}
		for _, g := range groups {
			cases += len(g.Tests)
			t.Run(name+"/"+g.Description, func(t *testing.T) { g.run(t) })
		}
	}
	if cases < 1200 {
		t.Errorf("the suite has only %d cases", cases)
	}
	t.Logf("%d cases", cases)
}

func (g *suiteGroup) run(t *testing.T) {
	f := newFiles(os.DirFS(suite+"/remotes"), "http://localhost:1234/")
	if err := f.scan(); err != nil {
		t.Fatal(err)
	}
	const file = "orders.yaml"
	document := "name: order.placed\nversion: 1\nowner: shop\ndescription: d\nreplay: safe\nschema: " + string(g.Schema)
	r := &reader{files: f}
	r.readText(file, []byte(document))
	if len(r.problems) > 0 || len(r.entries) != 1 {
		t.Fatalf("the schema does not compile: %v", r.problems)
	}
	for _, c := range g.Tests {
		if faults := check(r.entries[0].compiled, c.Data); (len(faults) == 0) != c.Valid {
			t.Errorf("%s: valid is to be %v, found %v", c.Description, c.Valid, faults)
		}
	}
}
