package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/setup"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// grant gives a role what a relay needs on the tables, or an application on those of a group, in one
// transaction.
func grant(ctx context.Context, w io.Writer, cfg *Config, o migrateOptions) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	config, err := migrationConn(cfg)
	if err != nil {
		return err
	}
	conn, err := pg.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // its transaction has ended
	schema := cfg.Postgres.own(tables).Schema
	statements := groupGrants(o.only, schema, o.grant)
	if o.relay() {
		sequences, err := table.Sequences(ctx, conn, tables)
		if err != nil {
			return err
		}
		statements = grants(tables, sequences, schema, o.grant)
	}
	if _, err := conn.Exec(ctx, strings.Join(statements, "; ")); err != nil {
		return hint.Wrap(fmt.Errorf("grant privileges to role %s: %w", o.grant, err), adviseGrant(err, o))
	}
	for _, s := range statements {
		fmt.Fprintln(w, s)
	}
	return nil
}

// grants are the statements. Walpost's own tables stand in schema, and ids come from sequences.
func grants(tables []*outbox.Table, sequences []string, schema, role string) (all []string) {
	for _, g := range setup.RelayGrants(tables, sequences, schema, role) {
		all = append(all, g.SQL())
	}
	return all
}

// groupGrants are the statements for an application's role, which reads and writes rows and owns no table.
func groupGrants(only []migrations.Group, schema, role string) (all []string) {
	for _, g := range only {
		for _, t := range g.Tables() {
			all = append(all, fmt.Sprintf("GRANT SELECT, INSERT, UPDATE, DELETE ON %s.%s TO %s",
				outbox.QuoteIdent(schema), t, outbox.QuoteIdent(role)))
		}
	}
	return all
}

func adviseGrant(err error, o migrateOptions) string {
	switch pg.Code(err) {
	case pgerrcode.UndefinedObject:
		attributes := "LOGIN"
		if o.relay() {
			attributes = "LOGIN REPLICATION"
		}
		return fmt.Sprintf("as a superuser: CREATE ROLE %s %s", outbox.QuoteIdent(o.grant), attributes)
	case pgerrcode.UndefinedTable:
		return advisePublication(err)
	case pgerrcode.InsufficientPrivilege:
		return "run it as the owner of the tables"
	}
	return ""
}
