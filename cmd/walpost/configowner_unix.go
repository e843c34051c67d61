//go:build unix

package main

import (
	"io/fs"
	"os"
	"syscall"

	"github.com/walpost/walpost/internal/hint"
)

// checkImplicit refuses a configuration that was found here and not named, if others may write it: it says
// where passwords of the environment go. It may belong to the user or to root, and its group may write it if
// that is the user's own.
func checkImplicit(path string, info fs.FileInfo) error {
	file, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	const advice = "name it with --config if it is to be read"
	mode := info.Mode().Perm()
	switch {
	case file.Uid != 0 && int(file.Uid) != os.Geteuid():
		return hint.Errorf(advice, "read configuration: %s here belongs to user %s", path, userName(file.Uid))
	case mode&0o002 != 0, mode&0o020 != 0 && int(file.Gid) != os.Getegid():
		return hint.Errorf(advice+"; or: chmod go-w "+path,
			"read configuration: %s here may be written by others (mode %04o)", path, mode)
	}
	return nil
}
