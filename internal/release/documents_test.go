package main

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
)

// TestLinksOfShippedDocumentsLeadSomewhere: offline, too. It follows every relative link of README and of the documents
// that it leads to, in the archives and in the packages.
func TestLinksOfShippedDocumentsLeadSomewhere(t *testing.T) {
	r := testRelease(t, platform{"linux", "amd64"}, platform{"windows", "amd64"})
	dir := t.TempDir()
	if err := r.stage(r.platforms[0], dir); err != nil {
		t.Fatal(err)
	}
	trees := map[string]fs.FS{"package": os.DirFS(filepath.Join(dir, "doc"))}
	for _, p := range r.platforms {
		contents, err := r.contents(p)
		if err != nil {
			t.Fatal(err)
		}
		archive := fstest.MapFS{}
		for _, e := range contents {
			if archive[e.name] != nil {
				t.Errorf("the archive of %s has %s twice", p, e.name)
			}
			archive[e.name] = &fstest.MapFile{Data: e.data}
		}
		trees[p.String()] = archive
	}
	for name, tree := range trees {
		if followed := followLinks(t, name, tree); followed < 300 {
			t.Errorf("%s: followed only %d links", name, followed)
		}
	}
}

var (
	codeBlock    = regexp.MustCompile("(?ms)^```.*?^```")
	markdownLink = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)
)

func followLinks(t *testing.T, name string, tree fs.FS) (followed int) {
	t.Helper()
	err := fs.WalkDir(tree, ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil || path.Ext(file) != ".md" {
			return err
		}
		text, err := fs.ReadFile(tree, file)
		for _, m := range markdownLink.FindAllSubmatch(codeBlock.ReplaceAll(text, nil), -1) {
			link := string(m[1])
			if strings.Contains(link, "://") {
				continue
			}
			followed++
			if _, err := fs.Stat(tree, path.Join(path.Dir(file), link)); err != nil {
				t.Errorf("%s: %s links to %s: %v", name, file, link, err)
			}
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return followed
}
