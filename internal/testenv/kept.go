package testenv

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// EnvKept names the folder of what is made once for all test processes: data directories as initdb leaves
// them, and programs. The default is .cache/test in the checkout. Each account has a folder of its own there.
const EnvKept = "WALPOST_TEST_KEPT"

// keptPath returns the path of what has this key, and makes the folder for it. It fails where nothing can be
// kept: then each process makes its own.
func keptPath(kind string, key ...string) (string, error) {
	root := os.Getenv(EnvKept)
	if root == "" {
		checkout, err := checkoutOf()
		if err != nil {
			return "", err
		}
		root = filepath.Join(checkout, ".cache", "test")
	}
	parent := filepath.Join(root, fmt.Sprint("uid", os.Geteuid()))
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return "", err
	}
	hash := sha256.Sum256([]byte(strings.Join(key, "\x00")))
	return filepath.Join(parent, kind+"-"+hex.EncodeToString(hash[:8])), nil
}

// checkoutOf finds walpost's go.mod in the directory that a test runs in, or above.
func checkoutOf() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module github.com/walpost/walpost\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("find walpost's go.mod: none")
		}
	}
}

// keepTree keeps a copy of a directory at path. It is complete when it appears there: processes that make it
// at the same time each fill a directory of their own, and the first rename wins.
func keepTree(path, dir string) error {
	beside, err := os.MkdirTemp(filepath.Dir(path), "making-")
	if err != nil {
		return err
	}
	err = copyTree(filepath.Join(beside, "tree"), dir, nil, nil)
	if err == nil {
		err = os.Rename(filepath.Join(beside, "tree"), path)
	}
	if errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTEMPTY) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(beside))
}

// alone runs fn while no other process runs one for the same path.
func alone(path string, fn func() error) error {
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return fn()
}
