package main

import (
	"bufio"
	"context"
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// counts says how often each block of code has run.
type counts map[block]int

type block struct {
	file      string // with its import path
	line, col int    // where it begins
}

// since is by how much later counts exceed earlier ones, where they do.
func (c counts) since(earlier counts) counts {
	grown := counts{}
	for b, n := range c {
		if n > earlier[b] {
			grown[b] = n - earlier[b]
		}
	}
	return grown
}

func blocks(rounds []counts) map[block]bool {
	all := map[block]bool{}
	for _, c := range rounds {
		for b := range c {
			all[b] = true
		}
	}
	return all
}

// atLeast is how often a block has run in all rounds but the given share of them.
func atLeast(rounds []counts, b block, but float64) int {
	var all []int
	for _, c := range rounds {
		all = append(all, c[b])
	}
	slices.Sort(all)
	return all[int(but*float64(len(all)))]
}

// readCounts reads what a program built with -cover has written to a directory.
func readCounts(ctx context.Context, dir string) (counts, error) {
	text := filepath.Join(dir, "text")
	cmd := exec.CommandContext(ctx, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("read counters: %w\n%s", err, out)
	}
	return parseCounts(text)
}

// parseCounts reads lines such as "example.org/x/file.go:10.20,12.3 2 41".
func parseCounts(name string) (counts, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	c := counts{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		at, rest, found := strings.Cut(lines.Text(), ".go:")
		if !found {
			continue // the first line
		}
		var b block
		var n, skip int
		_, err := fmt.Sscanf(rest, "%d.%d,%d.%d %d %d", &b.line, &b.col, &skip, &skip, &skip, &n)
		if err != nil {
			return nil, fmt.Errorf("read counters: %q: %w", lines.Text(), err)
		}
		b.file = at + ".go"
		c[b] = n
	}
	return c, lines.Err()
}

// functions are those of production that ran more often in nine of ten rounds with a row than in half of
// those without. What runs on a ticker is not among them.
func (c *checkout) functions(rows, idle []counts) (found functions) {
	grown := map[string][]block{}
	for b := range blocks(rows) {
		if atLeast(rows, b, 0.1) > atLeast(idle, b, 0.5) {
			grown[b.file] = append(grown[b.file], b)
		}
	}
	for _, p := range c.packages {
		if p.group == production {
			found = append(found, p.functions(grown)...)
		}
	}
	return found
}

func (p *pkg) functions(ran map[string][]block) (found functions) {
	entries := p.entries()
	for _, file := range p.files {
		name := filepath.Base(p.fset.Position(file.Pos()).Filename)
		blocks := ran[path.Join(p.ImportPath, name)]
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && holds(p.fset, f, blocks) {
				entry := entries[p.info.Defs[f.Name]]
				found = append(found, function{path.Join(p.room, name), functionName(f), entry})
			}
		}
	}
	return found
}

func holds(fset *token.FileSet, f *ast.FuncDecl, blocks []block) bool {
	from, to := fset.Position(f.Pos()).Line, fset.Position(f.End()).Line
	for _, b := range blocks {
		if from <= b.line && b.line <= to {
			return true
		}
	}
	return false
}

func functionName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver := f.Recv.List[0].Type
	if star, ok := receiver.(*ast.StarExpr); ok {
		receiver = star.X
	}
	if generic, ok := receiver.(*ast.IndexExpr); ok {
		receiver = generic.X
	}
	return fmt.Sprintf("%s.%s", receiver, f.Name.Name)
}
