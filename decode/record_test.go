package decode_test

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

var record = flag.Bool("record", false, "record testdata/pg*.gz and their renderings again")

// varying is what differs from one recording to the next: LSNs, transaction IDs and commit times.
var varying = regexp.MustCompile(`[0-9A-F]+/[0-9A-F]+| xid \d+|(?m:^(begin|commit) .*)`)

// TestRecord records testdata/scenario.sql from every server that the tests run on:
//
//	go test ./decode -run TestRecord -record
//
// Without -record it compares what the server sends with what was recorded.
func TestRecord(t *testing.T) {
	opts := testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "2"}}
	testenv.ClustersWith(t, opts, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		execFile(t, connect(t, url), filepath.Join("testdata", "scenario.sql"))
		text := receive(t, url, "recorded", "recorded")
		rendered := render(text)
		base := filepath.Join("testdata", fmt.Sprintf("pg%d", pg.Version()))
		if *record {
			check(t, os.WriteFile(base+".txt", []byte(rendered), 0o644))
			check(t, writeRecording(base+"-text.gz", text))
			return
		}
		want, err := os.ReadFile(base + ".txt")
		if errors.Is(err, fs.ErrNotExist) {
			t.Skipf("nothing was recorded from PostgreSQL %d", pg.Version())
		}
		check(t, err)
		diff(t, "session", varying.ReplaceAllString(rendered, "$1"), varying.ReplaceAllString(string(want), "$1"))
	})
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
