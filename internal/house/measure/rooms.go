package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/types"
	"path/filepath"
	"slices"
)

// rooms are the packages of production, one by one.
func (c *checkout) rooms() table {
	t := table{
		title: "Packages",
		note:  roomsNote,
		columns: []string{
			"package", "lines", "long lines", "files", "exported names",
			"arrows", "back up", "files in cycles",
		},
	}
	for _, p := range c.packages {
		if p.group != production {
			continue
		}
		// Its files were read before.
		all, long, _ := lines(p.sources())
		g := p.arrows()
		t.add(p.room, all, long, len(p.sources()), p.exported(), g.size(), g.backUp(), g.inCycles())
	}
	slices.SortStableFunc(t.rows, func(a, b row) int { return cmp.Compare(a.name, b.name) })
	return t
}

const roomsNote = `
Production only. Exported names are package-level names and methods of exported types. An arrow leads
from a file to another file of its package that declares a package-level name or a method which the first one
uses. "Back up" is how many arrows lead upwards when the files stand in the order with the fewest such arrows.
That order is found by moving one file at a time; a better one may exist. Files in cycles can reach
themselves along arrows; this number is exact.`

func (p *pkg) exported() (n int) {
	scope := p.types.Scope()
	for _, name := range scope.Names() {
		o := scope.Lookup(name)
		if !o.Exported() {
			continue
		}
		n++
		for _, m := range methods(o) {
			if m.Exported() {
				n++
			}
		}
	}
	return n
}

// methods are those that a type declares, or an interface asks for.
func methods(o types.Object) (all []*types.Func) {
	name, ok := o.(*types.TypeName)
	if !ok || name.IsAlias() {
		return nil
	}
	named := name.Type().(*types.Named)
	for m := range named.Methods() {
		all = append(all, m)
	}
	if i, ok := named.Underlying().(*types.Interface); ok {
		for m := range i.ExplicitMethods() {
			all = append(all, m)
		}
	}
	return all
}

func (p *pkg) fileOf(o types.Object) string { return filepath.Base(p.fset.Position(o.Pos()).Filename) }

// manyMethods is from how many methods on a type is listed.
const manyMethods = 20

func (c *checkout) largestTypes() table {
	t := table{
		title:   "Largest types",
		note:    fmt.Sprintf("Types of production with %d methods or more, and their files.", manyMethods),
		columns: []string{"type", "methods", "files"},
	}
	for _, p := range c.packages {
		if p.group != production {
			continue
		}
		for _, name := range p.types.Scope().Names() {
			all := methods(p.types.Scope().Lookup(name))
			files := map[string]bool{}
			for _, m := range all {
				files[p.fileOf(m)] = true
			}
			if len(all) >= manyMethods {
				t.add(p.room+"."+name, len(all), len(files))
			}
		}
	}
	return t
}

// arrows are the uses of names between the package's files.
func (p *pkg) arrows() *graph {
	g := newGraph()
	for _, file := range p.files {
		from := filepath.Base(p.fset.Position(file.Pos()).Filename)
		g.node(from)
		ast.Inspect(file, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && p.declares(p.info.Uses[id]) {
				g.arrow(from, p.fileOf(p.info.Uses[id]))
			}
			return true
		})
	}
	return g
}

func (p *pkg) declares(o types.Object) bool {
	if o == nil || o.Pkg() != p.types {
		return false
	}
	f, ok := o.(*types.Func)
	return o.Parent() == p.types.Scope() || ok && f.Signature().Recv() != nil
}

// entries are the functions that are exported, or used in another file of their package.
func (p *pkg) entries() map[types.Object]bool {
	entries := map[types.Object]bool{}
	for _, o := range p.info.Defs {
		if f, ok := o.(*types.Func); ok && f.Exported() {
			entries[f] = true
		}
	}
	for id, o := range p.info.Uses {
		user := filepath.Base(p.fset.Position(id.Pos()).Filename)
		if f, ok := o.(*types.Func); ok && f.Pkg() == p.types && p.fileOf(f) != user {
			entries[f.Origin()] = true
		}
	}
	return entries
}
