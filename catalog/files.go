package catalog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// catalogURL stands for the catalogue's root in the addresses of schemas: they refer to each other by
// relative paths.
const catalogURL = "catalog:///"

// files are the files of a catalogue. It is the only source of schemas: nothing is fetched from elsewhere.
type files struct {
	fsys fs.FS
	base string
	yaml []string       // paths
	docs map[string]any // schemas by their address, and by their $id
	errs map[string]error
}

func newFiles(fsys fs.FS, base string) *files {
	return &files{fsys: fsys, base: base, docs: map[string]any{}, errs: map[string]error{}}
}

// scan finds the files, and reads the schemas among them.
func (f *files) scan() error {
	err := fs.WalkDir(f.fsys, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		hidden := name != "." && strings.HasPrefix(d.Name(), ".")
		switch {
		case hidden && d.IsDir():
			return fs.SkipDir
		case hidden || d.IsDir():
		case path.Ext(name) == ".yaml" || path.Ext(name) == ".yml":
			f.yaml = append(f.yaml, name)
		case path.Ext(name) == ".json":
			f.addSchema(name)
		}
		return nil
	})
	slices.Sort(f.yaml)
	return err
}

// addSchema reads a schema's file. An error waits until something refers to the file.
func (f *files) addSchema(name string) {
	text, err := fs.ReadFile(f.fsys, name)
	var doc any
	if err == nil {
		doc, err = jsonschema.UnmarshalJSON(bytes.NewReader(text))
	}
	if err != nil {
		f.errs[f.address(name)] = err
		return
	}
	f.docs[f.address(name)] = doc
	if object, ok := doc.(map[string]any); ok {
		if id, ok := object["$id"].(string); ok {
			f.docs[strings.TrimSuffix(id, "#")] = doc
		}
	}
}

// address of a file.
func (f *files) address(name string) string {
	return f.base + (&url.URL{Path: name}).EscapedPath()
}

// Load is what the compiler calls for a schema that another one refers to.
func (f *files) Load(address string) (any, error) {
	if doc, ok := f.docs[address]; ok {
		return doc, nil
	}
	if err := f.errs[address]; err != nil {
		return nil, err
	}
	if name, ours := strings.CutPrefix(address, f.base); ours {
		return nil, fmt.Errorf("the catalogue has no file %s", name)
	}
	return nil, errors.New("it is not in the catalogue, and nothing is fetched from elsewhere")
}

// node is a schema at its place: references are relative to it.
type node struct {
	schema  any
	doc     string // address
	pointer string // within the document, as in "/properties/total"
}

// child is a part of the node's schema.
func (n node) child(schema any, tokens ...string) node {
	for _, t := range tokens {
		n.pointer += "/" + pointerEscapes.Replace(t)
	}
	n.schema = schema
	return n
}

func (n node) object() map[string]any {
	object, _ := n.schema.(map[string]any)
	return object
}

// target is what a node's $ref names, or false where that cannot be told from its text: an $anchor, or a
// base that an $id inside the document has changed.
func (f *files) target(n node) (node, bool) {
	ref, ok := n.object()["$ref"].(string)
	if !ok {
		return n, false
	}
	base, err := url.Parse(n.doc)
	if err != nil {
		return n, false
	}
	u, err := base.Parse(ref)
	if err != nil || u.Fragment != "" && u.Fragment[0] != '/' {
		return n, false
	}
	pointer := u.Fragment
	u.Fragment, u.RawFragment = "", ""
	doc, ok := f.docs[u.String()]
	if !ok {
		return n, false
	}
	found := node{schema: doc, doc: u.String()}
	for _, token := range strings.Split(pointer, "/")[1:] {
		if found, ok = found.step(strings.NewReplacer("~1", "/", "~0", "~").Replace(token)); !ok {
			return n, false
		}
	}
	return found, true
}

func (n node) step(token string) (node, bool) {
	switch v := n.schema.(type) {
	case map[string]any:
		value, ok := v[token]
		return n.child(value, token), ok
	case []any:
		i, err := strconv.Atoi(token)
		if err != nil || i < 0 || i >= len(v) {
			return n, false
		}
		return n.child(v[i], token), true
	}
	return n, false
}

// mostRefs is how many references to references are followed.
const mostRefs = 32

// follow is the schema at the end of a node's references.
func (f *files) follow(n node) node {
	for range mostRefs {
		next, ok := f.target(n)
		if !ok {
			break
		}
		n = next
	}
	return n
}
