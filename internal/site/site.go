// Package site renders the project's Markdown documents as a web site of plain files. All links between its
// pages are relative, so that it works below any path and from the file system. It makes no external request.
package site

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

//go:embed assets/site.css assets/site.js assets/layout.html
var assets embed.FS

// policy goes into each page, too: a page that is opened as a file has no headers.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"base-uri 'none'; form-action 'none'"

// Site is the documentation of one version.
type Site struct {
	documents         fs.FS
	version, revision string
	files             func() (map[string][]byte, error) // by name; rendered once
}

// New is the site of the Markdown files and pictures in documents, by their paths in the repository. It
// renders them when they are first asked for. Version and revision are those of `walpost version`.
func New(documents fs.FS, version, revision string) *Site {
	s := &Site{documents: documents, version: version, revision: revision}
	s.files = sync.OnceValues(s.render)
	return s
}

// Handler serves the site. Its index page is the path "/": mount it with http.StripPrefix.
func (s *Site) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy+"; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
			return
		}
		files, err := s.files()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		name := path.Clean("/" + r.URL.Path)[1:]
		if name == "" {
			name = "index.html"
		}
		content, found := files[name]
		if !found {
			http.Error(w, "no such page: the pages are listed in index.html", http.StatusNotFound)
			return
		}
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
	})
}

// Write writes the site's files to a directory, which it creates, and returns their number.
func (s *Site) Write(dir string) (int, error) {
	files, err := s.files()
	if err != nil {
		return 0, err
	}
	for name, content := range files {
		file := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return 0, fmt.Errorf("write documents: %w", err)
		}
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return 0, fmt.Errorf("write documents: %w", err)
		}
	}
	return len(files), nil
}

// render makes all files of the site.
func (s *Site) render() (map[string][]byte, error) {
	pages, pictures, err := s.read()
	if err != nil {
		return nil, err
	}
	files := pictures
	for _, name := range []string{"site.css", "site.js"} {
		if files[name], err = assets.ReadFile("assets/" + name); err != nil {
			return nil, err
		}
	}
	layout, err := assets.ReadFile("assets/layout.html")
	if err != nil {
		return nil, err
	}
	for i, p := range pages {
		files[p.file] = s.fill(string(layout), pages, i)
	}
	files["search.js"], err = searchIndex(pages)
	return files, err
}

// read renders the Markdown files, in the order of the navigation. The rest are pictures.
func (s *Site) read() (pages []*page, pictures map[string][]byte, err error) {
	pictures = map[string][]byte{}
	texts := map[string][]byte{}
	err = fs.WalkDir(s.documents, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(s.documents, name)
		if path.Ext(name) == ".md" {
			texts[name] = content
		} else {
			pictures[siteFile(name)] = content
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read documents: %w", err)
	}
	for name, text := range texts {
		p, err := s.page(name, text)
		if err != nil {
			return nil, nil, fmt.Errorf("render %s: %w", name, err)
		}
		pages = append(pages, p)
	}
	slices.SortFunc(pages, inOrder)
	return pages, pictures, nil
}
