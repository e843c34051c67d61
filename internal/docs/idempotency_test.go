package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"testing"
)

var fieldDefault = regexp.MustCompile(`Default:\s+\[?([^.\]]+(?:\.\w[^.\]]*)*)`)

func TestIdempotencyOptions(t *testing.T) {
	testOptions(t, "docs/IDEMPOTENCY.md", "idempotency/options.go", "Options")
}

// testOptions: a page's table names every field of a struct, with the default that its comment gives.
func testOptions(t *testing.T, file, code, name string) {
	t.Helper()
	source, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, code), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	defaults := map[string]string{}
	var coded []string
	ast.Inspect(source, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != name {
			return true
		}
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			field := f.Names[0].Name
			coded = append(coded, field)
			defaults[field] = "required"
			if m := fieldDefault.FindStringSubmatch(regexp.MustCompile(`\s+`).ReplaceAllString(f.Doc.Text(), " ")); m != nil {
				defaults[field] = m[1]
			}
		}
		return false
	})
	var documented []string
	for _, row := range rows(section(t, file, "## Options")) {
		documented = append(documented, row[0])
		want := defaults[row[0]]
		if len(row[1]) > len(want) || want[:len(row[1])] != row[1] {
			t.Errorf("%s: the default of %s is %q, its comment says %q", file, row[0], row[1], want)
		}
	}
	same(t, file, documented, coded)
}
