package relay_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestIndexesInDocs: docs/TABLES.md has the indexes that doctor names for the tables of other relays, and no other ones.
func TestIndexesInDocs(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/TABLES.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Indexes\n")
	section, _, _ = strings.Cut(section, "\n## ")
	documented := regexp.MustCompile(`CREATE INDEX CONCURRENTLY [^;]*`).FindAllString(section, -1)
	missing := map[string]bool{}
	for _, statement := range documented {
		missing[plainSQL(statement)] = true
	}
	testenv.Cluster(t, func(t *testing.T, _ *testenv.Postgres) {
		for _, name := range []string{"eventferry", "prisma"} {
			r := existingRig(t, existingTables[name], relay.ModeAuto)
			for _, fix := range r.missingIndexes() {
				if !missing[plainSQL(fix)] {
					t.Errorf("docs/TABLES.md lacks for %s: %s", name, fix)
				}
				delete(missing, plainSQL(fix))
			}
		}
		for statement := range missing {
			t.Errorf("docs/TABLES.md has an index that doctor does not name: %s", statement)
		}
	})
}

func plainSQL(sql string) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(strings.ReplaceAll(sql, `"`, ""), "public.", "")), " ")
}

// missingIndexes are the statements that doctor has for indexes. It has none when they were made.
func (r *rig) missingIndexes() (fixes []string) {
	r.t.Helper()
	examine := func() (fixes []string) {
		x, err := relay.New(r.cfg, zap.NewNop(), prometheus.NewRegistry())
		r.must(err)
		for _, f := range x.Examine(r.t.Context()) {
			if f.Code == "table-index" {
				fixes = append(fixes, f.Fix)
			}
		}
		return fixes
	}
	for _, fix := range examine() {
		fixes = append(fixes, fix)
		r.exec(strings.Replace(fix, " CONCURRENTLY", "", 1))
	}
	if again := examine(); len(again) > 0 {
		r.t.Errorf("doctor names indexes that were made: %q", again)
	}
	return fixes
}
