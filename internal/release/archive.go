package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// entry is a file of an archive, or a directory if its name ends in a slash.
type entry struct {
	name string
	mode int64
	data []byte
}

func byName(a, b entry) int { return cmp.Compare(a.name, b.name) }

// tarball is a tar archive: sorted, all files of root and of one time.
func tarball(entries []entry, at time.Time) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range slices.SortedFunc(slices.Values(entries), byName) {
		kind := byte(tar.TypeReg)
		if strings.HasSuffix(e.name, "/") {
			kind = tar.TypeDir
		}
		err := w.WriteHeader(&tar.Header{
			Typeflag: kind, Name: e.name, Mode: e.mode, Size: int64(len(e.data)), ModTime: at,
			Format: tar.FormatUSTAR,
		})
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

// compressed has neither a time nor a name in its header.
func compressed(data []byte) ([]byte, error) {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	err = w.Close()
	return b.Bytes(), err
}

func tarGz(entries []entry, at time.Time) ([]byte, error) {
	data, err := tarball(entries, at)
	if err != nil {
		return nil, err
	}
	return compressed(data)
}

func zipped(entries []entry, at time.Time) ([]byte, error) {
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, e := range slices.SortedFunc(slices.Values(entries), byName) {
		h := &zip.FileHeader{Name: e.name, Method: zip.Deflate, Modified: at}
		h.SetMode(fs.FileMode(e.mode))
		f, err := w.CreateHeader(h)
		if err != nil {
			return nil, err
		}
		if _, err := f.Write(e.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

// archives has the program of each platform with what belongs to it, and the documents as pages.
func (r *release) archives(context.Context) error {
	for _, p := range r.platforms {
		entries, err := r.contents(p)
		if err != nil {
			return err
		}
		pack, ending := tarGz, ".tar.gz"
		if p.os == "windows" {
			pack, ending = zipped, ".zip"
		}
		data, err := pack(below(r.folder(p), entries), r.at)
		if err == nil {
			err = writeFile(r.path(r.folder(p)+ending), data)
		}
		if err != nil {
			return err
		}
	}
	pages, err := directory(filepath.Join(r.work, "docs"))
	if err != nil {
		return err
	}
	name := "walpost_" + r.version + "_docs"
	data, err := tarGz(below(name, pages), r.at)
	if err != nil {
		return err
	}
	return writeFile(r.path(name+".tar.gz"), data)
}

// folder is the archive's name without its ending, and the directory in it.
func (r *release) folder(p platform) string { return "walpost_" + r.version + "_" + p.String() }

// contents are the files of an archive.
func (r *release) contents(p platform) ([]entry, error) {
	program, err := os.ReadFile(r.programFile(p))
	if err != nil {
		return nil, err
	}
	all := []entry{{p.program(), 0o755, program}}
	documents, err := r.documents()
	if err != nil {
		return nil, err
	}
	all = append(all, documents...)
	for _, source := range []string{"walpost.example.yaml", "grants.sql"} {
		data, err := os.ReadFile(filepath.Join(r.root, "deploy", source))
		if err != nil {
			return nil, err
		}
		all = append(all, entry{source, 0o644, data})
	}
	if p.os == "linux" {
		units, err := r.units()
		if err != nil {
			return nil, err
		}
		all = append(all, units...)
	}
	for _, name := range []string{"man", "completions"} {
		files, err := directory(filepath.Join(r.work, name))
		if err != nil {
			return nil, err
		}
		all = append(all, below(name, files)...)
	}
	return all, nil
}

// directory is all files below a directory.
func directory(dir string) (all []entry, err error) {
	root := os.DirFS(dir)
	err = fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(root, name)
		all = append(all, entry{name, 0o644, data})
		return err
	})
	return all, err
}

func below(dir string, entries []entry) []entry {
	moved := slices.Clone(entries)
	for i := range moved {
		moved[i].name = path.Join(dir, moved[i].name)
	}
	return moved
}
