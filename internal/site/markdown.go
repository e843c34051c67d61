package site

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	east "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/text"
)

// repository is where links to files lead that the site does not have.
const repository = "https://github.com/walpost/walpost/blob/"

// page is a document.
type page struct {
	source   string // its path in the repository
	file     string // its name in the site
	title    string
	body     []byte
	headings []heading
	sections []section
}

type heading struct {
	level    int
	id, text string
}

// section is the text between two headings, for the search.
type section struct {
	heading
	words string
}

// Cells are aligned by an attribute: the policy refuses a style.
var markdown = goldmark.New(goldmark.WithExtensions(
	extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute)),
	extension.Strikethrough, extension.Linkify,
))

func (s *Site) page(source string, content []byte) (*page, error) {
	p := &page{source: source, file: siteFile(source)}
	doc := markdown.Parser().Parse(text.NewReader(content))
	p.outline(doc, content)
	if err := s.rewriteLinks(doc, source); err != nil {
		return nil, err
	}
	s.drawDiagrams(doc, content)
	var body bytes.Buffer
	err := markdown.Renderer().Render(&body, content, doc)
	p.body = body.Bytes()
	return p, err
}

// siteFile is the name of a document or picture in the site. All pages are in one directory.
func siteFile(source string) string {
	if path.Ext(source) != ".md" {
		return strings.TrimPrefix(source, "docs/")
	}
	name := strings.TrimSuffix(strings.TrimPrefix(source, "docs/"), ".md")
	if name == "README" {
		return "index.html"
	}
	return strings.ReplaceAll(strings.TrimSuffix(name, "/README"), "/", "-") + ".html"
}

// outline gives the headings their ids, and collects the headings and the text below each.
func (p *page) outline(doc ast.Node, source []byte) {
	used := map[string]int{}
	for block := doc.FirstChild(); block != nil; block = block.NextSibling() {
		h, ok := block.(*ast.Heading)
		if !ok {
			if n := len(p.sections); n > 0 {
				p.sections[n-1].words += plain(block, source) + " "
			}
			continue
		}
		found := heading{level: h.Level, text: strings.TrimSpace(plain(h, source))}
		found.id = anchor(found.text)
		if used[found.id]++; used[found.id] > 1 {
			found.id += "-" + strconv.Itoa(used[found.id]-1)
		}
		if p.title == "" {
			p.title = found.text
		}
		p.headings = append(p.headings, found)
		p.sections = append(p.sections, section{heading: found})
		h.SetAttributeString("id", found.id)
		link(h, found.id)
	}
}

// link adds a link of the heading to itself.
func link(h *ast.Heading, id string) {
	self := ast.NewLink()
	self.Destination = []byte("#" + id)
	self.SetAttributeString("class", "self")
	self.SetAttributeString("aria-label", "Link to this section")
	self.AppendChild(self, ast.NewString([]byte("#")))
	h.AppendChild(h, self)
}

// anchor is the id that GitHub gives a heading.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.Pc):
			return unicode.ToLower(r)
		}
		return -1
	}, heading)
}

// plain is the text of a node without its marks.
func plain(node ast.Node, source []byte) string {
	var b strings.Builder
	// Walk fails only where the function does.
	_ = ast.Walk(node, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		switch n := n.(type) {
		case *ast.Text:
			if entering {
				b.Write(n.Segment.Value(source))
				if n.SoftLineBreak() || n.HardLineBreak() {
					b.WriteByte(' ')
				}
			}
		case *ast.FencedCodeBlock, *ast.CodeBlock:
			if entering {
				b.Write(n.Lines().Value(source))
			}
		case *ast.Paragraph, *ast.TextBlock, *east.TableCell:
			if !entering {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// drawDiagrams has the pictures that .ci/diagrams has drawn in place of diagrams. One that was changed since
// then stays text.
func (s *Site) drawDiagrams(doc ast.Node, source []byte) {
	for block := doc.FirstChild(); block != nil; block = block.NextSibling() {
		code, ok := block.(*ast.FencedCodeBlock)
		if !ok || string(code.Language(source)) != "mermaid" {
			continue
		}
		sum := sha256.Sum256(code.Lines().Value(source))
		file := "diagrams/" + hex.EncodeToString(sum[:])[:12] + ".svg"
		if _, err := fs.Stat(s.documents, "docs/"+file); err != nil {
			continue
		}
		picture := ast.NewLink()
		picture.Destination = []byte(file)
		image := ast.NewImage(picture)
		image.AppendChild(image, ast.NewString([]byte("Diagram")))
		paragraph := ast.NewParagraph()
		paragraph.AppendChild(paragraph, image)
		doc.ReplaceChild(doc, block, paragraph)
		block = paragraph
	}
}

// rewriteLinks has links lead to the site's pages and, for other files, into the repository.
func (s *Site) rewriteLinks(doc ast.Node, source string) error {
	return ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Link:
			n.Destination = []byte(s.destination(source, string(n.Destination)))
		case *ast.Image:
			n.Destination = []byte(s.destination(source, string(n.Destination)))
		}
		return ast.WalkContinue, nil
	})
}

// Links are the files and directories to which a document's relative links and pictures lead, from its place.
func Links(document []byte) (targets []string) {
	doc := markdown.Parser().Parse(text.NewReader(document))
	// Walk fails only where the function does.
	_ = ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		var to []byte
		switch n := n.(type) {
		case *ast.Link:
			to = n.Destination
		case *ast.Image:
			to = n.Destination
		}
		target, err := url.Parse(string(to))
		if entering && err == nil && !target.IsAbs() && target.Path != "" {
			targets = append(targets, target.Path)
		}
		return ast.WalkContinue, nil
	})
	return targets
}

func (s *Site) destination(source, to string) string {
	target, err := url.Parse(to)
	if err != nil || target.IsAbs() || target.Path == "" {
		return to
	}
	file := path.Join(path.Dir(source), target.Path)
	if _, err := fs.Stat(s.documents, path.Join(file, "README.md")); err == nil {
		file = path.Join(file, "README.md")
	}
	address := repository + s.ref() + "/" + file
	if info, err := fs.Stat(s.documents, file); err == nil && !info.IsDir() {
		address = siteFile(file)
	}
	if target.Fragment != "" {
		address += "#" + target.Fragment
	}
	return address
}

var (
	tag      = regexp.MustCompile(`^v\d+\.\d+\.\d+(-(alpha|beta|rc)[.\d]*)?$`)
	revision = regexp.MustCompile(`^[0-9a-f]{7,40}$`)
)

// ref names this version in the repository.
func (s *Site) ref() string {
	if tag.MatchString(s.version) {
		return s.version
	}
	if revision.MatchString(s.revision) {
		return s.revision
	}
	return "main"
}
