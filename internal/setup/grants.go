package setup

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Grant is one GRANT.
type Grant struct {
	Privileges []Privilege
	Kind       string // "TABLE", "SEQUENCE", "SCHEMA" or "DATABASE"
	Object     string // quoted, and with its schema
	Role       string
}

// Privilege is one of a [Grant], on the columns only where there are some.
type Privilege struct {
	Name    string
	Columns []string
}

// SQL is the statement.
func (g Grant) SQL() string {
	kind := g.Kind + " "
	if g.Kind == "TABLE" {
		kind = ""
	}
	var all []string
	for _, p := range g.Privileges {
		text := p.Name
		if len(p.Columns) > 0 {
			var names []string
			for _, c := range p.Columns {
				names = append(names, outbox.QuoteIdent(c))
			}
			text += " (" + strings.Join(names, ", ") + ")"
		}
		all = append(all, text)
	}
	return fmt.Sprintf("GRANT %s ON %s%s TO %s", strings.Join(all, ", "), kind, g.Object,
		outbox.QuoteIdent(g.Role))
}

// held reports whether a role has all of it; "public" is what every role has.
func (g Grant) held(ctx context.Context, conn *pgx.Conn, role string) (held bool, err error) {
	object := "to_regclass($2)::oid"
	switch g.Kind {
	case "SCHEMA":
		object = `(SELECT oid FROM pg_namespace WHERE $2 = concat('"', replace(nspname, '"', '""'), '"'))`
	case "DATABASE":
		object = `(SELECT oid FROM pg_database WHERE $2 = concat('"', replace(datname, '"', '""'), '"'))`
	}
	for _, p := range g.Privileges {
		args := []any{role, g.Object, p.Name}
		sql := fmt.Sprintf(`SELECT coalesce(has_%s_privilege($1::name, %s, $3), false)`,
			strings.ToLower(g.Kind), object)
		if len(p.Columns) > 0 {
			sql = `SELECT coalesce(bool_and(
					has_column_privilege($1::name, to_regclass($2)::oid, c, $3)), false)
				FROM unnest($4::text[]) c`
			args = append(args, p.Columns)
		}
		if err = conn.QueryRow(ctx, sql, args...).Scan(&held); err != nil || !held {
			break
		}
	}
	if err != nil {
		return false, fmt.Errorf("read privileges on %s: %w", g.Object, err)
	}
	return held, nil
}

func privileges(names string) (all []Privilege) {
	for name := range strings.SplitSeq(names, ", ") {
		all = append(all, Privilege{Name: name})
	}
	return all
}

// RelayGrants are what a relay needs on its tables. Walpost's own tables stand in schema, and ids come from
// sequences.
func RelayGrants(tables []*outbox.Table, sequences []string, schema, role string) (all []Grant) {
	add := func(kind, object string, privileges []Privilege) {
		all = append(all, Grant{privileges, kind, object, role})
	}
	in := outbox.QuoteIdent(schema) + "."
	for _, t := range tables {
		p := privileges("SELECT")
		if table.Changes(t) {
			p = append(p, Privilege{"UPDATE", table.UpdateColumns(t)})
		}
		if table.Deletes(t) {
			p = append(p, Privilege{Name: "DELETE"})
		}
		add("TABLE", t.SQL(), p)
	}
	if slices.ContainsFunc(tables, table.Journals) {
		for _, need := range table.JournalPrivileges {
			if need.Table == table.KnownTable {
				continue // as for every outbox
			}
			add("TABLE", in+need.Table, privileges(need.Privileges))
		}
	}
	for _, s := range sequences {
		add("SEQUENCE", s, privileges("SELECT"))
	}
	add("TABLE", in+table.DeadLetters, privileges("SELECT, INSERT"))
	add("TABLE", in+table.Archive, privileges("SELECT"))
	add("TABLE", in+table.Replays, privileges("SELECT, INSERT, UPDATE"))
	add("TABLE", in+table.KnownTable, privileges(table.KnownPrivileges))
	add("TABLE", in+table.SentTable, privileges(table.SentPrivileges))
	return all
}

// places gives the owner and the relay the database and the schema.
func (s *Setup) places(ctx context.Context) (steps []*Step, err error) {
	owner, schema := outbox.QuoteIdent(s.facts.Owner), outbox.QuoteIdent(s.schema())
	database := outbox.QuoteIdent(s.facts.Database)
	if !s.facts.OwnerCreatesInDatabase && !s.cfg.Poll {
		steps = append(steps, s.grant("The owner makes the publication.",
			Grant{privileges("CREATE"), "DATABASE", database, s.facts.Owner}))
	}
	switch {
	case !s.facts.SchemaExists:
		steps = append(steps, s.exec("The schema of the tables.",
			fmt.Sprintf("CREATE SCHEMA %s AUTHORIZATION %s", schema, owner)))
	case !s.facts.OwnerCreatesInSchema:
		steps = append(steps, s.grant("The owner makes the tables.",
			Grant{privileges("CREATE"), "SCHEMA", schema, s.facts.Owner}))
	}
	for _, role := range []string{s.cfg.Role, s.cfg.App} {
		if role == "" {
			continue
		}
		for _, g := range []Grant{
			{privileges("CONNECT"), "DATABASE", database, role},
			{privileges("USAGE"), "SCHEMA", schema, role},
		} {
			held, err := g.held(ctx, s.conn, s.present(role))
			if err != nil {
				return nil, err
			}
			if !held {
				steps = append(steps, s.grant("The role reaches the tables.", g))
			}
		}
	}
	return steps, nil
}

// grant is a step that fails where PostgreSQL only warns: who may grant nothing grants nothing.
func (s *Setup) grant(why string, g Grant) *Step {
	step := s.exec(why, g.SQL())
	grants := step.do
	step.do = func(ctx context.Context) error {
		err := grants(ctx)
		if err != nil {
			return err
		}
		held, err := g.held(ctx, s.conn, g.Role)
		if err == nil && !held {
			err = hint.Errorf(
				"run `walpost init` as the owner of the database, or as a superuser: --postgres-url",
				"%q may not do that: %s", s.facts.User, g.SQL())
		}
		return err
	}
	return step
}

// present is a role that exists, or else all roles.
func (s *Setup) present(role string) string {
	if role == s.cfg.Role && !s.facts.RoleExists {
		return "public"
	}
	return role
}

// grants gives the relay's role what it needs on the tables, where it does not own them.
func (s *Setup) grants(ctx context.Context) ([]*Step, error) {
	if s.relayOwns() {
		return nil, nil
	}
	list := func(ctx context.Context) ([]Grant, error) {
		sequences, err := s.sequences(ctx)
		return RelayGrants(s.cfg.Outboxes, sequences, s.schema(), s.cfg.Role), err
	}
	return s.granting(ctx, "The relay's role reads the events, marks them, and records failures.",
		s.cfg.Role, list)
}

// sequences are those of the ids. Before the tables are there, they are those that the migrations make.
func (s *Setup) sequences(ctx context.Context) (all []string, err error) {
	if there, err := s.tablesExist(ctx); err != nil || there {
		if err != nil {
			return nil, err
		}
		return table.Sequences(ctx, s.conn, s.cfg.Outboxes)
	}
	for _, t := range s.cfg.Outboxes {
		if !table.Journals(t) {
			continue
		}
		var name string
		err := s.conn.QueryRow(ctx, `SELECT concat(quote_ident($1), '.', quote_ident($2))`,
			t.Schema, t.Name+"_id_seq").Scan(&name)
		if err != nil {
			return nil, fmt.Errorf("name the sequence of %s: %w", t, err)
		}
		all = append(all, name)
	}
	return all, nil
}

// producer lets the application insert events, column by column: a row that is inserted as processed would
// not be delivered. The id is for RETURNING.
func (s *Setup) producer(ctx context.Context) ([]*Step, error) {
	if s.cfg.App == "" {
		return nil, nil
	}
	list := func(context.Context) ([]Grant, error) {
		var all []Grant
		for _, t := range s.cfg.Outboxes {
			all = append(all, Grant{[]Privilege{
				{"INSERT", inserted(t)}, {"SELECT", []string{t.Layout.Columns[outbox.ID]}},
			}, "TABLE", t.SQL(), s.cfg.App})
		}
		return all, nil
	}
	return s.granting(ctx, "The application inserts events, and reads the id of each.", s.cfg.App, list)
}

// inserted are the columns that a producer writes.
func inserted(t *outbox.Table) (columns []string) {
	relays := append(t.Layout.MarkFields(), outbox.ID, outbox.Attempts, outbox.LastError, outbox.Status)
	for f, column := range t.Layout.Columns {
		field := outbox.Field(f)
		if column != "" && !slices.Contains(relays, field) && !t.Layout.InJournal(field) {
			columns = append(columns, column)
		}
	}
	return columns
}

// granting is the step of grants that the owner makes. list is asked again when it is done: then the tables
// are there.
func (s *Setup) granting(
	ctx context.Context, why, role string, list func(context.Context) ([]Grant, error),
) ([]*Step, error) {
	planned, err := list(ctx)
	if err != nil {
		return nil, err
	}
	step := &Step{Why: why, Done: true}
	for _, g := range planned {
		step.SQL = append(step.SQL, g.SQL())
		held, err := g.held(ctx, s.conn, s.present(role))
		if err != nil {
			return nil, err
		}
		step.Done = step.Done && held
	}
	step.do = func(ctx context.Context) error {
		all, err := list(ctx)
		if err != nil {
			return err
		}
		for _, g := range all {
			if _, err := s.conn.Exec(ctx, g.SQL()); err != nil {
				return err
			}
		}
		return nil
	}
	return []*Step{step}, nil
}
