package decode_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

var record = flag.Bool("record", false, "record testdata/pg*.gz and their renderings anew")

// TestRecord records testdata/scenario.sql from every server that the tests
// run on, in text and in binary:
//
//	go test ./decode -run TestRecord -record
//
// The two recordings of one server share a rendering, for their events must
// be the same. Without -record it compares the two modes only.
func TestRecord(t *testing.T) {
	opts := testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "2"}}
	testenv.ClustersWith(t, opts, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		execFile(t, connect(t, url), filepath.Join("testdata", "scenario.sql"))
		text := receive(t, url, "recorded_text", "recorded", false)
		binary := receive(t, url, "recorded_binary", "recorded", true)
		rendered := render(text)
		diff(t, "binary", render(binary), rendered)
		if !*record || t.Failed() {
			return
		}
		base := filepath.Join("testdata", fmt.Sprintf("pg%d", pg.Version()))
		check(t, os.WriteFile(base+".txt", []byte(rendered), 0o644))
		check(t, writeRecording(base+"-text.gz", text))
		check(t, writeRecording(base+"-binary.gz", binary))
	})
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
