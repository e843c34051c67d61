package relay_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestRestoredDump: the database is restored from a dump on another server. What the dump has as delivered is not sent again, and
// neither is what was delivered after it was made: the stream says so. What is committed there from then on is stored.
func TestRestoredDump(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			pg := testenv.SharedPostgres(t)
			r := newRig(t, pg)
			r.markWith(mark)
			r.cfg.Source = "shop"
			r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			r.put(1, 10)
			r.pending(0)
			x.halt()
			r.put(11, 15)
			database := r.query1(`SELECT current_database()::text`)
			dump := filepath.Join(t.TempDir(), "dump.sql")
			pgCommand(t, "pg_dump", "--create", "--file", dump, "--dbname", pg.URL(database))
			x = r.start().streaming()
			r.pending(0)
			const since = 1000 + 17_384 // more than the messages that a start reads back
			r.put(1001, since)
			r.pending(0)
			x.halt()

			other := testenv.NewPostgres(t, testenv.PGOptions{})
			pgCommand(t, "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--file", dump, "--dbname", other.URL("postgres"))
			r.disconnect()
			r.pg, r.url = other, other.URL(database)
			r.cfg.PostgresURL = r.url
			r.cfg.Initial = "pending"
			r.duplicateWindowPasses(100 * time.Millisecond)
			x = r.start().streaming()
			r.pending(0)
			r.put(16, 20)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 15, 1001, since, 16, 20)
			x.quietBut("server_rolled_back", "nothing_to_compare") // the newest messages are of rows that the dump does not have
		})
	}
}

// TestRestoredBesideARelay: somebody restores the database from a dump while a relay runs, which takes a while: the outbox's rows are
// there long before the journal's entries. No row is stored again, and what is committed from then on is stored.
func TestRestoredBesideARelay(t *testing.T) {
	t.Parallel()
	for _, mark := range testenv.Some(t, 1, outbox.MarkUpdate, outbox.MarkJournal) {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			pg := testenv.SharedPostgres(t)
			r := newRig(t, pg)
			r.markWith(mark)
			r.cfg.FallbackInterval = 200 * time.Millisecond
			r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			const rows = 17_384 // more than the messages that a start reads back
			r.put(1, rows)
			r.pending(0)
			r.passes(r.here())
			dump := filepath.Join(t.TempDir(), "dump.sql")
			url := pg.URL(r.query1(`SELECT current_database()::text`))
			pgCommand(t, "pg_dump", "--clean", "--if-exists", "--file", dump, "--dbname", url)
			slowly(t, dump)
			r.put(rows+1, rows+100)
			r.pending(0)
			r.passes(r.here())
			r.disconnect()
			pgCommand(t, "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--file", dump, "--dbname", url)
			r.exec(`SELECT setval(pg_get_serial_sequence('outbox_messages', 'id'), $1)`, rows+100)
			r.put(rows+101, rows+110)
			eventually(t, "the rows that came after it are stored", func() bool { return r.storedCount() >= rows+110 })
			r.passes(r.here())
			x.halt()
			r.storedIs(1, rows+110)
		})
	}
}

// slowly has a script bring the rows of the outbox first, and those of other tables long after them.
func slowly(t *testing.T, script string) {
	t.Helper()
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	copied := regexp.MustCompile(`(?ms)^COPY .*?^\\\.$`)
	var blocks []string
	const place = "-- rows\n"
	rest := copied.ReplaceAllStringFunc(string(text), func(block string) string {
		blocks = append(blocks, block)
		return place
	})
	if len(blocks) < 4 {
		t.Fatalf("the dump has rows of %d tables", len(blocks))
	}
	slices.SortStableFunc(blocks, func(a, b string) int {
		outboxFirst := func(s string) int {
			if strings.HasPrefix(s, "COPY public.outbox_messages ") {
				return 0
			}
			return 1
		}
		return outboxFirst(a) - outboxFirst(b)
	})
	blocks[0] += "\nSELECT pg_sleep(5);"
	rest = strings.Replace(rest, place, strings.Join(blocks, "\n")+"\n", 1)
	if err := os.WriteFile(script, []byte(rest), 0o600); err != nil {
		t.Fatal(err)
	}
}

// pgCommand runs a program of PostgreSQL's, of the newest version that is installed.
func pgCommand(t *testing.T, name string, args ...string) {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err != nil || len(found) == 0 {
		t.Fatalf("no program %s: %v", name, err)
	}
	slices.Sort(found)
	if out, err := exec.CommandContext(t.Context(), found[len(found)-1], args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}
