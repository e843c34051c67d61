//go:build unix

package main

import (
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/setup"
)

// checkOwners has root write no file that another user's relay could not read: with mode 0600 it would be
// root's.
func checkOwners(steps []*setup.Step) error {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, step := range steps {
		if step.File == "" || step.Done || step.ByHand {
			continue
		}
		if reader := readerOf(step.File); reader != "" {
			return hint.Errorf("run init as that user, as in: "+asUser(reader, "walpost init"),
				"%s would belong to root, and the relay's user %s could not read it", step.File, reader)
		}
	}
	return nil
}

// readerOf is the user who reads a file: its owner, or in a package's directory the package's user; "" is
// root.
func readerOf(file string) string {
	if info, err := os.Lstat(file); err == nil {
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
			return userName(uid)
		}
	}
	dir := filepath.Dir(absolute(file))
	info, err := os.Stat(dir)
	if err == nil && dir == filepath.Dir(systemConfigFile) && info.Sys().(*syscall.Stat_t).Gid != 0 {
		return packageUser
	}
	return ""
}

func userName(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return id
}
