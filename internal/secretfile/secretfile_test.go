package secretfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/hint"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for path, want := range map[string]string{
		file("line", "s3cret\n"): "s3cret", file("windows", "s3cret\r\n"): "s3cret", file("spaces", " s3 cret "): " s3 cret ",
	} {
		if got, err := Read("key", path); err != nil || got != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	for path, want := range map[string]string{
		file("empty", ""): "is empty", file("newline", "\n"): "is empty", dir: "is not a regular file",
		filepath.Join(dir, "missing"): "no such file", file("two", "s3cret\ns3cret\n"): "more than one line",
		file("large", strings.Repeat("s3cret", limit)): "larger than 64 KiB",
	} {
		_, err := Read("key", path)
		if err == nil || !strings.HasPrefix(err.Error(), "key: ") || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "s3cret") || hint.Of(err) == "" {
			t.Errorf("%s: %v", path, err)
		}
	}
}
