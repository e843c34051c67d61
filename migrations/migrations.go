// Package migrations creates walpost's tables and its publication.
//
// The tables are numbered plain SQL files with goose annotations. They only ever go forward: up creates, it
// never drops a table that holds a row, and never takes a lock that a producer would wait for. A [Runner]
// applies them to a database under an advisory lock; [Print] writes them as plain SQL for those who have a
// migration tool of their own. Each belongs to a [Group], and a database may get the groups one by one.
//
// The publication is not one of the files, because its name and its tables come from the configuration:
// package stream creates it.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

//go:embed *.sql
var files embed.FS

// VersionTable records in the database which migrations were applied.
const VersionTable = "walpost_migrations"

const (
	// Latest is every migration there is, as the target of [Runner.Up] and [Print].
	Latest int64 = math.MaxInt64
	// OneStep is the migration applied last, as the target of [Runner.Down].
	OneStep int64 = -1
)

// ownTables are the outboxes that migrations make, by their versions, and only where the configuration reads
// an outbox of that layout from exactly that table.
var ownTables = map[int64]struct{ layout, name string }{
	canonicalVersion: {outbox.Canonical().Name, outbox.DefaultTable},
	12:               {outbox.Append().Name, outbox.AppendTable},
}

const canonicalVersion int64 = 1

// Migration is one step of the schema.
type Migration struct {
	Version int64
	// Name is the name of its file, "00001_outbox_messages.sql".
	Name string
	// Group is what its tables are for.
	Group Group
}

// All lists the migrations in their order. It panics where a file is misnamed or in no group: they are part
// of the program.
func All() []Migration {
	names, err := files.ReadDir(".")
	if err != nil {
		panic(err)
	}
	all := make([]Migration, len(names))
	for i, f := range names { // ReadDir sorts by name, and the numbers have leading zeros
		v, err := versionOf(f.Name())
		if err != nil || v < 1 || i > 0 && v <= all[i-1].Version {
			panic(fmt.Sprintf("migrations: %s has no number of its own: %v", f.Name(), err))
		}
		all[i] = Migration{Version: v, Name: f.Name(), Group: groupOf(v)}
	}
	return all
}

func versionOf(file string) (int64, error) {
	number, _, _ := strings.Cut(path.Base(file), "_")
	return strconv.ParseInt(number, 10, 64)
}

func nameOf(version int64) string {
	for _, m := range All() {
		if m.Version == version {
			return m.Name
		}
	}
	return fmt.Sprintf("migration %d", version)
}

// ErrNoVersion means that there is no migration of the version that was asked for.
var ErrNoVersion = errors.New("no such version")

// checkTarget reports a version that does not exist in the groups: a typing error must not pass for "nothing
// to do". Zero is a target of Down.
func checkTarget(to, least int64, only []Group) error {
	var versions []string
	for _, m := range of(only) {
		if m.Version == to {
			return nil
		}
		versions = append(versions, strconv.FormatInt(m.Version, 10))
	}
	if least == 0 {
		if to == 0 {
			return nil
		}
		versions = append([]string{"0"}, versions...)
	}
	return hint.Errorf("the versions are "+strings.Join(versions, ", ")+": see `walpost migrate status`",
		"find migration %d%s: %w", to, inGroups(only), ErrNoVersion)
}

// inGroups is " in group consumer", or nothing where every group is meant.
func inGroups(only []Group) string {
	if len(only) == 0 {
		return ""
	}
	names := make([]string, len(only))
	for i, g := range only {
		names[i] = string(g)
	}
	return " in group " + strings.Join(names, ", ")
}

// leftOut tells whether a migration makes an outbox that is none of the configuration's in that schema.
func leftOut(version int64, outboxes []*outbox.Table, schema string) bool {
	_, ok := ownTables[version]
	made := func(t *outbox.Table) bool { return makes(version, t, schema) }
	return ok && !slices.ContainsFunc(outboxes, made)
}

// makes tells whether the migration of ownTables makes the outbox.
func makes(version int64, t *outbox.Table, schema string) bool {
	own := ownTables[version]
	return t.Layout.Name == own.layout && t.Name == own.name && t.Schema == schema
}

// CheckOutboxes refuses an outbox that does not exist, unless a migration up to the version makes it in the
// schema. It changes nothing.
func CheckOutboxes(
	ctx context.Context, conn *pgx.Conn, outboxes []*outbox.Table, schema string, to int64,
) error {
	for _, t := range outboxes {
		exists := false
		for version := range ownTables {
			exists = exists || version <= to && makes(version, t, schema)
		}
		if exists {
			continue
		}
		err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, t.SQL()).Scan(&exists)
		if err != nil {
			return fmt.Errorf("look for %s: %w", t, err)
		}
		if !exists {
			return hint.Errorf("create the table first, or check outboxes[].table and outboxes[].layout: "+
				"migrations make public.outbox_messages for layout canonical, "+
				"and public.outbox_events for append",
				"table %s does not exist, and the migrations do not make it", t)
		}
	}
	return nil
}
