package catalog

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/internal/hint"
)

// maxVersion is the greatest event_version: the column is a SMALLINT.
const maxVersion = 1<<15 - 1

// keys are those of an entry.
var keys = []string{
	"name", "version", "owner", "description", "aggregate_type", "consumers", "replay", "replay_note",
	"schema", "schema_file",
}

// reader reads the entries of all files.
type reader struct {
	report
	files   *files
	entries []*Entry // those with a name and a version
	// unread are the files of which not every entry is known; "" is the whole catalogue.
	unread map[string]bool
}

func (r *reader) read() {
	if err := r.files.scan(); err != nil {
		r.fault(place{}, "catalog-missing", "let the user of the process read the directory",
			"read catalogue: %v", err)
		r.unread[""] = true
		return
	}
	if len(r.files.yaml) == 0 {
		r.fault(place{}, "catalog-empty", "write an entry: docs/CATALOG.md has one to copy",
			"the catalogue has no *.yaml file")
		return
	}
	for _, name := range r.files.yaml {
		r.readFile(name)
	}
	if len(r.entries) == 0 && len(r.problems) == 0 {
		r.fault(place{}, "catalog-empty", "write an entry: docs/CATALOG.md has one to copy",
			"the catalogue has no entry")
	}
}

func (r *reader) readFile(name string) {
	text, err := fs.ReadFile(r.files.fsys, name)
	if err != nil {
		r.fault(place{file: name}, "catalog-yaml", "let the user of the process read the file",
			"read: %v", err)
		r.unread[name] = true
		return
	}
	r.readText(name, text)
}

func (r *reader) readText(name string, text []byte) {
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			r.fault(place{file: name}, "catalog-yaml",
				"indent with spaces, and quote texts with a colon or a #",
				"%s", strings.TrimPrefix(err.Error(), "yaml: "))
			r.unread[name] = true
			return
		}
		if root := document.Content[0]; root.Tag != "!!null" {
			r.entry(name, root)
		}
	}
}

// entry reads an entry and compiles its schema. One with problems is kept, too, so that all of them are
// found at once, and it does not count as gone.
func (r *reader) entry(file string, n *yaml.Node) {
	before := len(r.problems)
	p := &parser{report: &r.report, file: file}
	e := &Entry{File: file, Line: n.Line}
	p.fill(e, n)
	if e.Name == "" || e.Version < 1 || e.Version > maxVersion {
		r.unread[file] = true
		return
	}
	if len(r.problems) == before || e.schema.schema != nil || e.schemaFile != "" {
		r.attach(e)
	}
	e.faulty = len(r.problems) > before
	r.entries = append(r.entries, e)
}

// attach gives the schema its address, and compiles it.
func (r *reader) attach(e *Entry) {
	if e.schemaFile != "" && e.schema.schema == nil {
		if !r.attachFile(e) {
			return
		}
	} else {
		// In the folder of its file, so that references are relative to that, and no file's name.
		e.schema.doc = r.files.address(e.File) + "!" + url.PathEscape(e.Name) + "!" + strconv.Itoa(e.Version)
		r.files.docs[e.schema.doc] = e.schema.schema
	}
	var err error
	if e.compiled, err = r.files.compile(e.schema.doc); err != nil {
		r.fault(e.at(), "catalog-schema", schemaAdvice(err), "the schema of %s: %s", e, schemaText(err))
	}
}

func (r *reader) attachFile(e *Entry) bool {
	name := path.Join(path.Dir(e.File), e.schemaFile)
	e.schema.doc = r.files.address(name)
	doc, err := r.files.Load(e.schema.doc)
	if err != nil {
		r.fault(e.at(), "catalog-schema", "name a *.json file of the catalogue, relative to this file",
			"schema_file %q: %v", e.schemaFile, err)
		return false
	}
	e.schema.schema = doc
	return true
}

// parser reads one entry.
type parser struct {
	*report
	file string
}

func (p *parser) fail(n *yaml.Node, fix, format string, args ...any) {
	p.fault(place{p.file, n.Line}, "catalog-entry", fix, format, args...)
}

func (p *parser) fill(e *Entry, n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		p.fail(n, "begin each entry with name:, and put --- between entries", "an entry is a mapping of keys")
		return
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if first := seen[k.Value]; first != nil {
			p.fail(k, "put --- between entries", "key %s is given twice, first in line %d", k.Value,
				first.Line)
			continue
		}
		seen[k.Value] = k
		p.field(e, k, v)
	}
	p.required(n, seen)
	if e.Replay == ReplayUnsafe && e.ReplayNote == "" && seen["replay_note"] == nil {
		p.fail(n, "add replay_note: what a consumer would do twice, and what to see to before",
			"replay is unsafe, and no replay_note says why")
	}
}

func (p *parser) required(n *yaml.Node, seen map[string]*yaml.Node) {
	for _, k := range []string{"name", "version", "owner", "description", "replay"} {
		if seen[k] == nil {
			p.fail(n, "add "+k+": docs/CATALOG.md says what it means", "an entry without %s", k)
		}
	}
	switch inline, file := seen["schema"], seen["schema_file"]; {
	case inline == nil && file == nil:
		p.fail(n, "add schema: {type: object, properties: ...}, or schema_file: FILE.json",
			"an entry without schema")
	case inline != nil && file != nil:
		p.fail(file, "keep one of them", "schema and schema_file are alternatives")
	}
}

func (p *parser) field(e *Entry, k, v *yaml.Node) {
	switch k.Value {
	case "name":
		e.Name = p.text(k, v)
	case "version":
		e.Version = p.version(v)
	case "owner":
		e.Owner = p.text(k, v)
	case "description":
		e.Description = p.text(k, v)
	case "aggregate_type":
		e.AggregateType = p.text(k, v)
	case "consumers":
		e.Consumers = p.texts(k, v)
	case "replay":
		e.Replay = p.replay(k, v)
	case "replay_note":
		e.ReplayNote = p.text(k, v)
	case "schema":
		before := len(p.problems)
		if schema := p.value(v); len(p.problems) == before {
			e.schema.schema = schema
		}
	case "schema_file":
		e.schemaFile = p.text(k, v)
	default:
		fix := hint.DidYouMean(k.Value, keys)
		if fix == "" {
			fix = "the keys are " + strings.Join(keys, ", ")
		}
		p.fail(k, fix, "unknown key %q", k.Value)
	}
}

func (p *parser) text(k, v *yaml.Node) string {
	text := strings.TrimSpace(v.Value)
	if v.Kind != yaml.ScalarNode || v.Tag == "!!null" || text == "" {
		p.fail(v, "write a text behind "+k.Value+":", "%s has no text", k.Value)
	}
	return text
}

func (p *parser) texts(k, v *yaml.Node) (all []string) {
	if v.Kind != yaml.SequenceNode {
		p.fail(v, "write "+k.Value+": [one, another], or [] for none", "%s is not a list", k.Value)
		return nil
	}
	for _, item := range v.Content {
		all = append(all, p.text(k, item))
	}
	return all
}

func (p *parser) version(v *yaml.Node) int {
	n, err := strconv.Atoi(v.Value)
	if v.Kind != yaml.ScalarNode || err != nil || n < 1 || n > maxVersion {
		p.fail(v, "write the event_version of the rows, which counts from 1",
			"version %q is no number from 1 to %d", v.Value, maxVersion)
	}
	return n
}

func (p *parser) replay(k, v *yaml.Node) Replay {
	known := []Replay{ReplaySafe, ReplayUnsafe}
	got := Replay(p.text(k, v))
	if got != "" && !slices.Contains(known, got) {
		p.fail(v, "write safe where consumers may get the event again, else unsafe",
			"replay %q is neither safe nor unsafe", string(got))
	}
	return got
}
