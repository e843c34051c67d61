package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Kind says where a passage stands.
type Kind string

// The kinds of passages.
const (
	Comment  Kind = "comment"
	Text     Kind = "text" // a string literal: an error, a log line, a usage text, a statement
	Name     Kind = "name" // what a Go file declares, its words apart
	Document Kind = "document"
	Code     Kind = "code" // a line of a code block in a document
)

// Passage is a piece of prose. Its lines are joined, so that a phrase is found across them.
type Passage struct {
	Kind Kind
	File string
	Line int
	Text string
}

// GoPassages are the comments, the string literals and the declared names of a Go file.
func GoPassages(path string) ([]Passage, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	g := goProse{fset: fset}
	for _, group := range file.Comments {
		g.add(Comment, group, group.Text())
	}
	ast.Inspect(file, g.visit)
	return g.passages, nil
}

type goProse struct {
	fset     *token.FileSet
	passages []Passage
}

func (g *goProse) add(kind Kind, at ast.Node, text string) {
	where := g.fset.Position(at.Pos())
	text = strings.Join(strings.Fields(text), " ")
	g.passages = append(g.passages, Passage{kind, where.Filename, where.Line, text})
}

func (g *goProse) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.ImportSpec:
		return false
	case *ast.BasicLit:
		if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
			g.add(Text, n, text)
		}
	case *ast.FuncDecl:
		g.name(n.Name)
	case *ast.TypeSpec:
		g.name(n.Name)
	case *ast.ValueSpec:
		g.name(n.Names...)
	case *ast.Field:
		g.name(n.Names...)
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			g.defined(n.Lhs)
		}
	case *ast.RangeStmt:
		if n.Tok == token.DEFINE {
			g.defined([]ast.Expr{n.Key, n.Value})
		}
	}
	return true
}

func (g *goProse) defined(left []ast.Expr) {
	for _, e := range left {
		if id, ok := e.(*ast.Ident); ok {
			g.name(id)
		}
	}
}

var humps = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+|[0-9]+`)

func (g *goProse) name(ids ...*ast.Ident) {
	for _, id := range ids {
		g.add(Name, id, strings.Join(humps.FindAllString(id.Name, -1), " "))
	}
}

// MarkdownPassages are the paragraphs, list items, table rows and headings of a document, and the lines of
// its code blocks.
func MarkdownPassages(path string) ([]Passage, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	m := markdown{file: path, begins: true}
	for line := range strings.Lines(string(text)) {
		m.line++
		m.read(strings.TrimSpace(line))
	}
	return m.passages, nil
}

type markdown struct {
	file     string
	line     int
	fenced   bool // in a code block
	begins   bool // the next line begins a passage
	passages []Passage
}

func (m *markdown) read(line string) {
	switch {
	case strings.HasPrefix(line, "```"):
		m.fenced = !m.fenced
		m.begins = true
	case m.fenced:
		m.passages = append(m.passages, Passage{Code, m.file, m.line, line})
	case line == "":
		m.begins = true
	case m.begins || block.MatchString(line):
		m.passages = append(m.passages, Passage{Document, m.file, m.line, line})
		m.begins = strings.HasPrefix(line, "#")
	default:
		m.passages[len(m.passages)-1].Text += " " + line
	}
}

// block matches the first line of a list item, a table row or a heading.
var block = regexp.MustCompile(`^(?:[-*|#>]|[0-9]+\. )`)

// Documents are the Markdown files of a checkout that the words are held in. The changelog tells of the past.
func Documents(root string) (files []string, err error) {
	for _, pattern := range []string{"README.md", "CONTRIBUTING.md", "docs/*.md", "deploy/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("no file in %s matches %s", root, pattern)
		}
		files = append(files, found...)
	}
	return files, nil
}
