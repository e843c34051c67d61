package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/walpost/walpost/internal/hint"
)

// Catalog is a catalogue that was read. Several goroutines may use it at once.
type Catalog struct {
	entries []*Entry // by name and version
	index   index
	files   *files
	// named are the entries that have a name and a version, also those with problems.
	named  index
	unread map[string]bool // see reader
}

// index finds entries by name and version.
type index map[string]map[int]*Entry

func (x index) add(e *Entry) {
	if x[e.Name] == nil {
		x[e.Name] = map[int]*Entry{}
	}
	x[e.Name][e.Version] = e
}

// Entries are all entries by name and version. Do not change them.
func (c *Catalog) Entries() []*Entry { return c.entries }

// Find is the entry of an event type's version, nil where there is none. Version 0 means 1, as it does in a
// [github.com/walpost/walpost/outbox.Message].
func (c *Catalog) Find(eventType string, version int) *Entry {
	return c.index[eventType][cmp.Or(version, 1)]
}

// Knows reports whether there is a version of the event type.
func (c *Catalog) Knows(eventType string) bool { return len(c.index[eventType]) > 0 }

// Load reads a catalogue: entries from all *.yaml and *.yml, schemas that they refer to from *.json, below
// the root and in folders, those with a dot in front left out. Its error is [Problems]: everything that is
// wrong. It does not apply the rules of [Check], so that a running catalogue is not refused for a name.
func Load(fsys fs.FS) (*Catalog, error) {
	c, problems := Check(fsys)
	problems = slices.DeleteFunc(problems, func(p Problem) bool { return p.rule })
	if len(problems) > 0 {
		return nil, problems
	}
	return c, nil
}

// LoadDir is [Load] of a directory.
func LoadDir(dir string) (*Catalog, error) {
	fsys, err := OpenDir(dir)
	if err != nil {
		return nil, err
	}
	return Load(fsys)
}

// OpenDir is a directory as [Load] and [Check] take it. Its error carries advice for the operator.
func OpenDir(dir string) (fs.FS, error) {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, hint.Coded("catalog-missing", hint.Errorf(
			"name the directory of the catalogue, or begin one: docs/CATALOG.md has an entry to copy",
			"read catalogue: %s does not exist", dir))
	}
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory", dir)
	}
	if err != nil {
		return nil, hint.Coded("catalog-missing", hint.Errorf(
			"name the directory that has the *.yaml files", "read catalogue: %w", err))
	}
	return os.DirFS(dir), nil
}

// Check reads a catalogue and applies all rules: those of [Load], and those about names, owners and personal
// data. The catalogue has the entries that can be used, and is never nil.
func Check(fsys fs.FS) (*Catalog, Problems) {
	r := &reader{files: newFiles(fsys, catalogURL), unread: map[string]bool{}}
	r.read()
	c := &Catalog{index: index{}, named: index{}, files: r.files, unread: r.unread}
	for _, e := range r.entries {
		c.add(e, &r.report)
		e.checkRules(r.files, &r.report)
	}
	slices.SortStableFunc(c.entries, func(a, b *Entry) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Version, b.Version))
	})
	slices.SortStableFunc(r.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	return c, r.problems
}

// add refuses a second entry of a version, and a second owner of a name.
func (c *Catalog) add(e *Entry, r *report) {
	if other := c.named[e.Name][e.Version]; other != nil {
		r.fault(e.at(), "catalog-twice", "keep one of them, or give the newer shape its own version",
			"%s is here and in %s:%d", e, other.File, other.Line)
		return
	}
	for _, other := range c.named[e.Name] {
		if other.Owner != e.Owner && other.Owner != "" && e.Owner != "" {
			r.fault(e.at(), "catalog-owner",
				"write the same owner in all versions: one team decides about an event",
				"%s has the owner %q here, and %q in %s:%d", e.Name, e.Owner, other.Owner, other.File,
				other.Line)
			break
		}
	}
	c.named.add(e)
	if !e.faulty {
		c.index.add(e)
		c.entries = append(c.entries, e)
	}
}
