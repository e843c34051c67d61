package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/walpost/walpost/internal/house"
)

const (
	program = "cmd/walpost"
	demo    = "cmd/walpost-demo"
)

// checkout is a folder with a version of the project.
type checkout struct {
	folder   string
	packages []*pkg // those of the project
	exports  map[string]string
}

// listed is what `go list` says of a package.
type listed struct {
	ImportPath, Dir, Export                            string
	GoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
	Module                                             *struct {
		Path string
		Main bool
	}
}

type pkg struct {
	listed
	room  string // the import path without the module's
	group string // production, rigs or demo
	fset  *token.FileSet
	files []*ast.File
	info  *types.Info
	types *types.Package
}

// Groups of packages. Production is the program, whatever it links, and every package that others may import.
const (
	production = "production"
	rigs       = "rigs"
	shown      = "demo"
)

func load(ctx context.Context, folder string) (*checkout, error) {
	c := &checkout{folder: folder, exports: map[string]string{}}
	all, err := c.list(ctx, "-export", "-deps", "./...")
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		c.exports[l.ImportPath] = l.Export
		if l.Module != nil && l.Module.Main {
			room := strings.TrimPrefix(l.ImportPath, l.Module.Path+"/")
			c.packages = append(c.packages, &pkg{listed: l, room: room})
		}
	}
	if err := c.group(ctx); err != nil {
		return nil, err
	}
	for _, p := range c.packages {
		if err := c.check(p); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *checkout) list(ctx context.Context, args ...string) (all []listed, err error) {
	const fields = "-json=ImportPath,Dir,Export,GoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles,Module"
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-buildvcs=false", fields}, args...)...)
	cmd.Dir, cmd.Stderr = c.folder, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w", strings.Join(args, " "), err)
	}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var l listed
		if err := d.Decode(&l); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
}

func (c *checkout) group(ctx context.Context) error {
	linked, err := c.list(ctx, "-deps", "./"+program)
	if err != nil {
		return err
	}
	links := map[string]bool{}
	for _, l := range linked {
		links[l.ImportPath] = true
	}
	for _, p := range c.packages {
		switch {
		case p.room == demo:
			p.group = shown
		case strings.HasPrefix(p.room, "internal/") && !links[p.ImportPath]:
			p.group = rigs
		default:
			p.group = production
		}
	}
	return nil
}

// check parses and type-checks a package without its tests.
func (c *checkout) check(p *pkg) error {
	p.fset = token.NewFileSet()
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(p.fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		p.files = append(p.files, file)
	}
	open := func(path string) (io.ReadCloser, error) { return os.Open(c.exports[path]) }
	p.info = &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.ForCompiler(p.fset, "gc", open)}
	var err error
	p.types, err = config.Check(p.ImportPath, p.fset, p.files, p.info)
	return err
}

// sources are the paths of the package's files, for every platform.
func (p *pkg) sources() (paths []string) {
	for _, name := range p.GoFiles {
		paths = append(paths, filepath.Join(p.Dir, name))
	}
	for _, name := range p.IgnoredGoFiles {
		if !strings.HasSuffix(name, "_test.go") {
			paths = append(paths, filepath.Join(p.Dir, name))
		}
	}
	return paths
}

func (p *pkg) tests() (paths []string) {
	for _, name := range append(append([]string{}, p.TestGoFiles...), p.XTestGoFiles...) {
		paths = append(paths, filepath.Join(p.Dir, name))
	}
	return paths
}

// lines are all lines of some files, and those that are too long.
func lines(paths []string) (all, long int, err error) {
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return 0, 0, err
		}
		all += bytes.Count(text, []byte("\n"))
		long += len(house.LongLines(string(text)))
	}
	return all, long, nil
}
