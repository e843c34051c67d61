package testenv

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// copyTree copies the directory src to dst, which must not exist, and gives
// everything to who. Files for which skip (path relative to src) is true are
// left out, directories with all they hold. A file that vanishes meanwhile is
// no error: a running server's directory can be copied.
func copyTree(dst, src string, who *account, skip func(rel string, d fs.DirEntry) bool) error {
	return filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != src {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		if skip != nil && skip(rel, d) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		err = copyEntry(filepath.Join(dst, rel), path, d)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return who.own(filepath.Join(dst, rel))
	})
}

func copyEntry(dst, src string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	switch {
	case d.IsDir():
		return os.Mkdir(dst, info.Mode().Perm())
	case d.Type() == fs.ModeSymlink:
		target, err := os.Readlink(src)
		if err != nil {
			return err
		}
		return os.Symlink(target, dst)
	case d.Type().IsRegular():
		return copyFile(dst, src, info.Mode().Perm())
	default:
		return nil // a socket: it belongs to the server that runs
	}
}

func copyFile(dst, src string, perm fs.FileMode) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	_, err = io.Copy(out, in)
	return err
}

// tail reads at most the last n bytes of a file, and nothing where there is
// none: it serves error messages.
func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-n), io.SeekStart)
	}
	b, _ := io.ReadAll(f)
	return string(b)
}
