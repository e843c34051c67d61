package testenv

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Edit is the path of one of the module's source files, a text of it, and what stands there instead: a defect
// that is planted to see a test notice it.
type Edit [3]string

// Plant adds the edited files to those for [BuildPatched]. Every text must be there once.
func Plant(ctx context.Context, files map[string]string, edits ...Edit) error {
	module, err := GoTool(ctx, "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return err
	}
	for _, e := range edits {
		file, from, to := e[0], e[1], e[2]
		name := filepath.Join(module, filepath.FromSlash(file))
		if _, begun := files[name]; !begun {
			text, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			files[name] = string(text)
		}
		if files[name], err = ReplaceOnce(files[name], from, to); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// ReplaceOnce replaces a text that must be there, once.
func ReplaceOnce(in, from, to string) (string, error) {
	if n := strings.Count(in, from); n != 1 {
		return "", fmt.Errorf("found %d times: %s", n, from)
	}
	return strings.Replace(in, from, to, 1), nil
}

// GoTool asks the go command for a line.
func GoTool(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "go", args...).Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}
