// Package secretfile reads secrets that the configuration names by their files, and writes such files.
package secretfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

// limit is far more than any password or URL takes.
const limit = 64 << 10

// Read returns the text of the file that the configuration's key names, without the line's end. Errors name
// the key and the file and repeat nothing of what it holds.
func Read(key, file string) (string, error) {
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() { // to open a pipe could wait without end
		err = fmt.Errorf("%s is not a regular file", file)
	}
	if err == nil && info.Size() > limit {
		err = fmt.Errorf("%s is larger than %d KiB", file, limit>>10)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return "", hint.Wrap(fmt.Errorf("%s: %w", key, err),
			"check the path and that walpost's user may read it")
	}
	secret := strings.TrimRight(string(text), "\r\n")
	if secret == "" {
		return "", hint.Wrap(fmt.Errorf("%s: %s is empty", key, file),
			"write the secret into it, on one line")
	}
	if strings.ContainsAny(secret, "\r\n\x00") {
		return "", hint.Wrap(errors.New(key+": "+file+" has more than one line"),
			"write the secret into it, on one line")
	}
	return secret, nil
}

// Write has a file appear as a whole, with mode 0600: a process that ends on the way leaves the old file, or
// none.
func Write(path, text string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".walpost-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.WriteString(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
