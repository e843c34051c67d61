// Package browser opens the console in a real Chromium, beside a real relay under load. Its tests hold what the
// page promises: no view has an error, no row acts on the page, and the keyboard reaches everything.
package browser

import (
	"flag"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// patience is for what the page waits for: some seconds, on a machine that is busy with something else.
const patience = 2 * time.Minute

var update = flag.Bool("update", false, "write docs/screenshots")

func TestMain(m *testing.M) { testenv.Main(m) }

// chromium is the browser's program. Without one the tests are skipped, except in CI.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "chrome"} {
		if program, err := exec.LookPath(name); err == nil {
			return program
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatal("chromium is missing: run .ci/deps chromium")
	}
	t.Skip("chromium is missing, and the console's page is not tested: run .ci/deps chromium")
	return ""
}
