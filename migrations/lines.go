package migrations

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

//go:embed */*.sql
var files embed.FS

const (
	// separator stands in a file between what up does and what down does.
	separator = "\n---- create above / drop below ----\n"
	// schemaMark stands in the files where the schema of a table does.
	schemaMark = "{schema}."
)

// line is a directory of files, 0001_NAME.sql and so on without gaps, and the table that says which of them a
// database has. A group has one line, and one more for each outbox that walpost makes.
type line struct {
	name  string
	group Group
	// layout is that of the outbox that the line makes, which has the line's name; "" where it makes none.
	layout string
	steps  []Migration
}

// lines in the order in which up goes through them. The outboxes come after the journal that they need.
var lines = []*line{
	newLine(Relay, "relay", ""),
	newLine(Relay, outbox.DefaultTable, outbox.Canonical().Name),
	newLine(Relay, outbox.AppendTable, outbox.Append().Name),
	newLine(Consumer, "consumer", ""),
	newLine(Idempotency, "idempotency", ""),
}

// Migration is one file.
type Migration struct {
	// Version counts the files of a line from one.
	Version int64
	// Name is the file's, "relay/0001_tables.sql".
	Name string
	// Group is what its tables are for.
	Group Group

	file *file
}

// file is what a migration's file says.
type file struct {
	line     *line
	up, down string
	hash     string // of up
}

// newLine panics where files are missing or misnamed: they are part of the program.
func newLine(group Group, directory, layout string) *line {
	l := &line{name: directory, group: group, layout: layout}
	names, err := fs.Glob(files, directory+"/*.sql") // sorted
	if err != nil || len(names) == 0 {
		panic(fmt.Sprintf("migrations: directory %s has no files: %v", directory, err))
	}
	for i, name := range names {
		text, err := files.ReadFile(name)
		up, down, found := strings.Cut(string(text), separator)
		if err != nil || !found || !strings.HasPrefix(path.Base(name), fmt.Sprintf("%04d_", i+1)) {
			panic(fmt.Sprintf("migrations: %s is not file %d of its line, with an up and a down", name, i+1))
		}
		hash := sha256.Sum256([]byte(up))
		l.steps = append(l.steps, Migration{
			Version: int64(i + 1), Name: name, Group: group,
			file: &file{line: l, up: up, down: down, hash: hex.EncodeToString(hash[:])},
		})
	}
	return l
}

// linesOf lists the lines of the groups, or all lines where no group is named.
func linesOf(only []Group) []*line {
	if len(only) == 0 {
		return lines
	}
	other := func(l *line) bool { return !slices.Contains(only, l.group) }
	return slices.DeleteFunc(slices.Clone(lines), other)
}

// wanted reports whether up goes through the line: an outbox is made only where the configuration reads one
// of that layout from exactly that table.
func (l *line) wanted(outboxes []*outbox.Table, schema string) bool {
	return l.layout == "" ||
		slices.ContainsFunc(outboxes, func(t *outbox.Table) bool { return l.makes(t, schema) })
}

func (l *line) makes(t *outbox.Table, schema string) bool {
	return t.Layout.Name == l.layout && t.Name == l.name && t.Schema == schema
}

// All lists what up applies in a schema that has nothing yet.
func All(outboxes []*outbox.Table, schema string, only ...Group) (all []Migration) {
	for _, l := range linesOf(only) {
		if l.wanted(outboxes, schema) {
			all = append(all, l.steps...)
		}
	}
	return all
}

// VersionTable begins the names of the tables that record what was applied; a line's name follows.
const VersionTable = "walpost_migrations"

// versionTable is the line's, with its schema.
func (l *line) versionTable(schema string) string {
	return outbox.QuoteIdent(schema) + "." + VersionTable + "_" + l.name
}

// applied reads when each file of the line was applied. It refuses a database that other files have made, and
// one whose record it cannot trust.
func (l *line) applied(ctx context.Context, conn *pgx.Conn, own pg.Own) (at []time.Time, err error) {
	table := l.versionTable(own.Schema)
	type record struct {
		Version int64
		Hash    string
		At      time.Time
	}
	var records []record
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		exists, err := l.checkOwner(ctx, tx, own, false)
		if err != nil || !exists {
			return err
		}
		rows, _ := tx.Query(ctx, `SELECT version, hash, applied_at FROM `+table+` ORDER BY version`)
		records, err = pgx.CollectRows(rows, pgx.RowToStructByPos[record])
		return err
	})
	if err != nil {
		return nil, err
	}
	for i, r := range records {
		switch {
		case r.Version != int64(i+1):
			return nil, hint.Errorf("restore the row, or the whole database, from a backup",
				"%s has version %d and no version %d", table, r.Version, i+1)
		case i >= len(l.steps):
			return nil, hint.Errorf("run `walpost migrate` of the version that made the tables, or a newer "+
				"one", "a newer walpost has made the tables: %s has version %d, this one knows %d",
				table, records[len(records)-1].Version, len(l.steps))
		case r.Hash != l.steps[i].file.hash:
			return nil, hint.Errorf("run `walpost migrate down --to 0` of the build that made the tables, "+
				"then `walpost migrate up` of this one",
				"another build of walpost has applied %s", l.steps[i].Name)
		}
		at = append(at, r.At.UTC())
	}
	return at, nil
}

// checkOwner reports whether the version table exists. It refuses what is no table, and one of a role that
// the present one neither trusts nor has the right to act for: its code would run as the migrating role, and
// its rows would say what is to be left out. A superuser reads another role's, but none that has code, behind
// a lock until the transaction ends, and does not change it.
func (l *line) checkOwner(
	ctx context.Context, tx pgx.Tx, own pg.Own, changes bool,
) (exists bool, err error) {
	table := own.Named(VersionTable + "_" + l.name)
	found, err := own.Find(ctx, tx.Conn(), VersionTable+"_"+l.name)
	if !pg.IsUntrusted(err) {
		return err == nil && found[0] == table, err
	}
	var locks bool
	err = tx.QueryRow(ctx, `SELECT `+pg.SuperSQL+` AND EXISTS (
			SELECT FROM pg_class WHERE oid = to_regclass($1) AND relkind = 'r')`, table).Scan(&locks)
	if err == nil && locks {
		_, err = tx.Exec(ctx, `LOCK TABLE ONLY `+table+` IN ACCESS SHARE MODE`)
	}
	if err != nil {
		return false, err
	}
	var owner string
	var is, super, acts, plain bool
	err = tx.QueryRow(ctx, `
		SELECT c.oid IS NOT NULL, coalesce(pg_get_userbyid(c.relowner)::text, ''), me.super,
			coalesce(c.relkind = 'r' AND pg_has_role(c.relowner, 'USAGE'), false),
			coalesce(c.relkind = 'r' AND NOT c.relhastriggers AND NOT c.relhasrules AND NOT c.relhassubclass
				AND NOT c.relispartition
				AND NOT EXISTS (SELECT FROM pg_index
					WHERE indrelid = c.oid AND num_nonnulls(indexprs, indpred) > 0)
				AND NOT EXISTS (SELECT FROM pg_statistic_ext WHERE stxrelid = c.oid)
				AND NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c')
				AND NOT EXISTS (SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
					WHERE a.attrelid = c.oid AND (a.attgenerated <> ''
						OR t.typnamespace <> 'pg_catalog'::regnamespace)), false)
		FROM (SELECT `+pg.SuperSQL+` AS super) me
			LEFT JOIN pg_class c ON c.oid = to_regclass($1)`, table).
		Scan(&is, &owner, &super, &acts, &plain)
	switch {
	case err != nil || !is:
		return false, err
	case super && plain && !changes, !super && acts:
		return true, nil
	}
	return true, hint.Errorf(fmt.Sprintf("name a URL of role %q, or of a member of it: --postgres-url, or "+
		"postgres.url; or name it in postgres.owner; if walpost did not make that table, drop it", owner),
		"migrate as the owner of walpost's tables: %s belongs to role %q", table, owner)
}

// run applies the migration, or takes it back, and records it.
func (m Migration) run(ctx context.Context, tx pgx.Tx, schema string, down bool) error {
	table := m.file.line.versionTable(schema)
	verb, sql := "apply", m.file.up
	record := fmt.Sprintf(`INSERT INTO %s (version, hash) VALUES (%d, '%s')`, table, m.Version, m.file.hash)
	if m.Version == 1 { // it fails if somebody else has made it meanwhile
		record = fmt.Sprintf(`CREATE TABLE %s (version bigint PRIMARY KEY, hash text NOT NULL,
			applied_at timestamptz NOT NULL DEFAULT clock_timestamp()); `, table) + record
	}
	if down {
		verb, sql = "take back", m.file.down
		record = fmt.Sprintf(`DELETE FROM %s WHERE version = %d`, table, m.Version)
		if m.Version == 1 {
			record = `DROP TABLE ` + table
		}
	}
	sql = strings.ReplaceAll(sql, schemaMark, outbox.QuoteIdent(schema)+".")
	for _, statements := range []string{sql, record} {
		if _, err := tx.Exec(ctx, statements); err != nil {
			return fmt.Errorf("%s %s: %w", verb, m.Name, err)
		}
	}
	return nil
}
