package badinput

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestBadInput starts the relay with everything that one server and its
// databases can have wrong at the same time.
func TestBadInput(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.SharedPostgres(t))
	run(t, s, slices.Concat(
		serverCases(s), roleCases(), tableCases(), publicationCases(), slotCases(s),
		brokerCases(s), streamCases(s), configCases(s), poolerCases(s),
	))
}

func writeFile(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
