package main

import (
	"io/fs"
	"os"
	"path"

	"github.com/walpost/walpost/internal/site"
)

// documents are README.md, the files that its links lead to, and theirs, at their places in the repository.
func (r *release) documents() (all []entry, err error) {
	root := os.DirFS(r.root)
	seen := map[string]bool{"README.md": true}
	for next := []string{"README.md"}; len(next) > 0; next = next[1:] {
		data, err := fs.ReadFile(root, next[0])
		if err != nil {
			return nil, err
		}
		all = append(all, entry{next[0], 0o644, data})
		if path.Ext(next[0]) != ".md" {
			continue
		}
		for _, link := range site.Links(data) {
			files, err := linked(root, path.Join(path.Dir(next[0]), link))
			if err != nil {
				return nil, err
			}
			for _, file := range files {
				if !seen[file] {
					seen[file] = true
					next = append(next, file)
				}
			}
		}
	}
	return all, nil
}

// linked is a file, or all files of a directory.
func linked(root fs.FS, name string) (files []string, err error) {
	err = fs.WalkDir(root, name, func(file string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, file)
		}
		return err
	})
	return files, err
}
