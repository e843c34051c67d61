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
func (l *line) applied(
	ctx context.Context, conn *pgx.Conn, own pg.Own, setUp bool,
) (at []time.Time, err error) {
	table := l.versionTable(own.Schema)
	type record struct {
		Version int64
		Hash    string
		At      time.Time
	}
	var records []record
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		exists, err := l.exists(ctx, tx, own, setUp)
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

// exists reports whether the version table exists. It refuses what is no table, and one of a role that the
// present one does not trust: its code would run as the migrating role, and its rows would say what is to be
// left out. A superuser makes one in another role's schema only in a set-up.
func (l *line) exists(ctx context.Context, tx pgx.Tx, own pg.Own, setUp bool) (exists bool, err error) {
	var super bool
	if err := tx.QueryRow(ctx, `SELECT `+pg.SuperSQL).Scan(&super); err != nil {
		return false, err
	}
	if super {
		own.Schemas, own.Names = nil, nil // nothing is done with the outboxes
	}
	table := own.Named(VersionTable + "_" + l.name)
	found, untrusted := own.Find(ctx, tx.Conn(), VersionTable+"_"+l.name)
	if !pg.IsUntrusted(untrusted) {
		return untrusted == nil && found[0] == table, untrusted
	}
	var owner string
	var trusted bool
	err = tx.QueryRow(ctx, `SELECT c.oid IS NOT NULL, coalesce(o.rolname::text, ''),
			coalesce(o.rolsuper OR o.rolname = current_user, false)
		FROM (SELECT) x LEFT JOIN pg_class c ON c.oid = to_regclass($1)
			LEFT JOIN pg_roles o ON o.oid = c.relowner`, table).
		Scan(&exists, &owner, &trusted)
	switch {
	case err != nil:
		return false, err
	case trusted: // and something else is not
		return true, untrusted
	case exists:
		const advice = "name a URL of role %q: --postgres-url, or postgres.url; " +
			"or name it in postgres.owner; if walpost did not make that table, drop it"
		return true, pg.Untrusted(fmt.Sprintf(advice, owner),
			"migrate as the owner of walpost's tables: %s belongs to role %q", table, owner)
	case super && !setUp:
		return false, untrusted
	}
	return false, nil
}

// run applies the migration, or takes it back, and records it.
func (m Migration) run(ctx context.Context, tx pgx.Tx, schema string, down bool) error {
	table := m.file.line.versionTable(schema)
	verb, sql := "apply", m.file.up
	record := fmt.Sprintf(`INSERT INTO %s (version, hash) VALUES (%d, '%s')`, table, m.Version, m.file.hash)
	if m.Version == 1 { // no row is written into what somebody else has made meanwhile
		record = fmt.Sprintf(`CREATE TABLE %s AS SELECT %d::bigint AS version, '%s'::text AS hash,
				clock_timestamp() AS applied_at;
			ALTER TABLE %[1]s ADD PRIMARY KEY (version), ALTER hash SET NOT NULL,
				ALTER applied_at SET NOT NULL, ALTER applied_at SET DEFAULT clock_timestamp()`,
			table, m.Version, m.file.hash)
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
