package setup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/secretfile"
	"github.com/walpost/walpost/outbox"
)

// wal has the server write what a slot needs.
func (s *Setup) wal(context.Context) ([]*Step, error) {
	if s.cfg.Poll {
		return nil, nil
	}
	const sql = "ALTER SYSTEM SET wal_level = 'logical'"
	const why = "The server writes into its WAL what a slot needs, from its next restart on."
	step := &Step{Why: why, SQL: []string{sql, "SELECT pg_catalog.pg_reload_conf()"}, do: s.setWALLevel}
	switch {
	case s.facts.WALLevel == "logical":
		step.Why, step.Done = "The server writes into its WAL what a slot needs.", true
	case s.facts.managed != nil:
		step.ByHand, step.SQL = true, []string{"-- " + s.facts.managed.SwitchOn}
	case !s.facts.Superuser:
		step.ByHand, step.SQL = true, []string{"-- as a superuser, and then restart the server: " + sql}
	default:
		step.Done = s.facts.fileSays
	}
	return []*Step{step}, nil
}

// setsWALLevel reports whether the connection's role may do so.
func (s *Setup) setsWALLevel() bool { return s.facts.Superuser && s.facts.managed == nil }

// setWALLevel waits until the server has read its configuration: doctor then sees that a restart is due.
func (s *Setup) setWALLevel(ctx context.Context) error {
	err := run(ctx, s.conn, "ALTER SYSTEM SET wal_level = 'logical'", "SELECT pg_reload_conf()")
	if err != nil {
		return err
	}
	for due, deadline := false, time.Now().Add(10*time.Second); !due && time.Now().Before(deadline); {
		err := s.conn.QueryRow(ctx,
			`SELECT pending_restart FROM pg_settings WHERE name = 'wal_level'`).Scan(&due)
		if err == nil && !due {
			_, err = s.conn.Exec(ctx, `SELECT pg_sleep(0.02)`)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// roles makes the relay's role and, where it is missing, the owner's.
func (s *Setup) roles(ctx context.Context) (steps []*Step, err error) {
	if !s.facts.OwnerExists && !s.relayOwns() {
		owner := outbox.QuoteIdent(s.facts.Owner)
		statements := []string{"CREATE ROLE " + owner}
		if !s.facts.Superuser {
			statements = append(statements,
				fmt.Sprintf("GRANT %s TO %s", owner, outbox.QuoteIdent(s.facts.User)))
		}
		steps = append(steps, s.exec("The role that owns the tables. Nobody logs in as it.", statements...))
	}
	password, err := s.passwordSteps(ctx)
	if err != nil {
		return nil, err
	}
	steps = append(steps, password...)
	if s.relayOwns() && !s.facts.IsOwner && !s.facts.Superuser {
		steps = append(steps, s.exec("The relay's role owns the tables, and this one makes them for it.",
			fmt.Sprintf("GRANT %s TO %s", outbox.QuoteIdent(s.cfg.Role), outbox.QuoteIdent(s.facts.User))))
	}
	if more := s.attributes(); more != nil {
		steps = append(steps, more)
	}
	return steps, nil
}

// passwordSteps are the password file, and the role that has the password. The file comes first: a set-up
// that is broken off in between finds the password there.
func (s *Setup) passwordSteps(ctx context.Context) ([]*Step, error) {
	written, err := s.hasPassword()
	if err != nil {
		return nil, err
	}
	file := &Step{
		Why: "The password of the relay's role is generated, and only this file has it (mode 0600).",
		ScriptWhy: "Choose the password of the relay's role, and write it on one line into this file, " +
			"which only the relay's user may read (mode 0600).",
		SQL:  []string{"-- write " + s.cfg.PasswordFile},
		File: s.cfg.PasswordFile,
		Done: written && !s.cfg.NewPassword,
		do: func(context.Context) error {
			return secretfile.Write(s.cfg.PasswordFile, rand.Text()+"\n")
		},
	}
	role := s.password("The relay connects as this role.", createRole(s.cfg))
	switch {
	case !s.facts.RoleExists && !s.cfg.Poll && !s.mayReplicate(): // REPLICATION comes from somebody else
		role = s.password(role.Why, loginRole(s.cfg))
	case !s.facts.RoleExists:
	case s.cfg.NewPassword:
		role = s.password("The role gets the new password. What logs in with the old one cannot any more.",
			"ALTER ROLE "+outbox.QuoteIdent(s.cfg.Role))
	case !written:
		return nil, hint.Errorf(fmt.Sprintf("write its password into %s, on one line; or set a new one with "+
			"--new-password, which ends what logs in with the old one; or choose another with --role",
			s.cfg.PasswordFile),
			"role %q exists, and its password is not known", s.cfg.Role)
	default:
		role.Done = true
		if err := s.tryPassword(ctx); err != nil {
			return nil, err
		}
	}
	return []*Step{file, role}, nil
}

func createRole(cfg Config) string {
	if cfg.Poll {
		return loginRole(cfg)
	}
	return loginRole(cfg) + " REPLICATION"
}

func loginRole(cfg Config) string { return "CREATE ROLE " + outbox.QuoteIdent(cfg.Role) + " LOGIN" }

// mayReplicate reports whether the acting role may make one that replicates. Before 16 only a superuser may,
// and from then on who may replicate himself.
func (s *Setup) mayReplicate() bool {
	return s.facts.Superuser || s.facts.Replicates && s.facts.Number >= 160000
}

// attributes gives the relay's role what it lacks; nil is nothing.
func (s *Setup) attributes() *Step {
	role := outbox.QuoteIdent(s.cfg.Role)
	var more string
	if s.facts.RoleExists && !s.facts.RoleLogsIn {
		more += " LOGIN"
	}
	needs := !s.cfg.Poll && !s.facts.RoleReplicates && (s.facts.RoleExists || !s.mayReplicate())
	if needs && s.mayReplicate() {
		more += " REPLICATION"
	}
	const why = "The relay's role may stream the WAL."
	switch m := s.facts.managed; {
	case needs && !s.mayReplicate() && m != nil && m.Role != "":
		return s.exec(why, fmt.Sprintf("GRANT %s TO %s", m.Role, role))
	case needs && !s.mayReplicate():
		step := s.exec(why, "-- as a superuser: ALTER ROLE "+role+" REPLICATION")
		step.ByHand = true
		return step
	case more != "":
		return s.exec("The relay's role exists, and lacks what a relay needs.", "ALTER ROLE "+role+more)
	}
	return nil
}

func (s *Setup) hasPassword() (written bool, err error) {
	if _, err := os.Stat(s.cfg.PasswordFile); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	_, err = s.readPassword()
	return err == nil, err
}

func (s *Setup) readPassword() (string, error) {
	return secretfile.Read("the relay's password", s.cfg.PasswordFile)
}

// password is a step of a statement to which the password of the file belongs.
func (s *Setup) password(why, statement string) *Step {
	return &Step{
		Why: why, SQL: []string{statement + " PASSWORD '...'"},
		ScriptWhy: why + " \\password asks for the password, which is that of " + s.cfg.PasswordFile + ".",
		Script:    statement + ";\n\\password " + outbox.QuoteIdent(s.cfg.Role) + "\n",
		do:        func(ctx context.Context) error { return s.setPassword(ctx, statement) },
	}
}

// setPassword runs a statement with the password of the file, in a form from which nobody reads it: the
// server may log its statements.
func (s *Setup) setPassword(ctx context.Context, statement string) error {
	password, err := s.readPassword()
	if err != nil {
		return err
	}
	secret, err := verifier(password)
	if err != nil {
		return err
	}
	_, err = s.conn.Exec(ctx, statement+" PASSWORD "+pg.QuoteLiteral(secret))
	return err
}

// tryPassword connects as the relay's role. Where the server asks for no password, nothing is proven.
func (s *Setup) tryPassword(ctx context.Context) error {
	if !s.facts.RoleLogsIn {
		return nil
	}
	url, err := RelayURL(s.cfg.Admin, s.cfg.Role, s.facts.Database)
	if err != nil {
		return err
	}
	conn, err := pg.Connect(ctx, pg.Config{URL: url, Files: pg.Files{Password: s.cfg.PasswordFile}})
	if err == nil {
		return conn.Close(ctx)
	}
	if pg.Code(err) == pgerrcode.InvalidPassword {
		return hint.Errorf("write the role's password into that file; or set a new one with --new-password, "+
			"which ends what logs in with the old one",
			"role %q exists, and %s has another password than it", s.cfg.Role, s.cfg.PasswordFile)
	}
	return nil // doctor finds what else is wrong
}
