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

// TestIdempotencyOptions: the table names every option, with the default that its comment gives.
func TestIdempotencyOptions(t *testing.T) {
	const file = "docs/IDEMPOTENCY.md"
	source, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "idempotency/options.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	defaults := map[string]string{}
	var coded []string
	ast.Inspect(source, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Options" {
			return true
		}
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			name := f.Names[0].Name
			coded = append(coded, name)
			defaults[name] = "required"
			if m := fieldDefault.FindStringSubmatch(regexp.MustCompile(`\s+`).ReplaceAllString(f.Doc.Text(), " ")); m != nil {
				defaults[name] = m[1]
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
