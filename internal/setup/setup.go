// Package setup makes what a relay needs in a database: wal_level, the roles, the tables, the publication and
// the grants. It reads what is there, plans what is missing as a list of steps, and does them one by one.
// Every step may be repeated, so a set-up that was broken off goes on where it was.
package setup

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// Config says what is to be there.
type Config struct {
	// Admin is the database, reached as a superuser or as another role that may do the steps.
	Admin pg.Config
	// Owner has the tables and the publication; "" is the owner of those that are there, or else the relay's
	// role, or the database's owner where the acting role may not act for that. Role is the relay's, App a
	// role that inserts events, "" for none.
	Owner, Role, App string
	Outboxes         []*outbox.Table
	Schema           string // of walpost's own tables; "" is the first outbox's
	Publication      string
	// Poll: the relay reads the tables only. It needs neither wal_level, REPLICATION nor a publication.
	Poll bool
	// PasswordFile has the password of the relay's role. A file that is missing is made, with a generated
	// one.
	PasswordFile string
	// NewPassword replaces the password, also of a role that exists.
	NewPassword bool
}

// Step is one step of a plan.
type Step struct {
	// Why says in one sentence what the step is for. ScriptWhy says it for psql, where it is something else.
	Why, ScriptWhy string
	// SQL are the statements, or what else is done. They show no password.
	SQL []string
	// Done: it is there already.
	Done bool
	// ByHand: somebody else has to do it. Do does nothing, and the other steps do not need it.
	ByHand bool
	// Script is the step for psql, where SQL is not.
	Script string
	// File is what the step writes beside the database, or "".
	File string

	do func(context.Context) error
}

// NewFile is a step that writes a file.
func NewFile(why, file string, write func() error) *Step {
	return &Step{
		Why: why, SQL: []string{"-- write " + file}, File: file,
		do: func(context.Context) error { return write() },
	}
}

// Setup is connected to the database. One goroutine uses it.
type Setup struct {
	cfg   Config
	conn  *pgx.Conn
	facts facts
}

// Open connects and reads what is there. It changes nothing.
func Open(ctx context.Context, cfg Config) (*Setup, error) {
	admin := cfg.Admin
	admin.Settings = map[string]string{"application_name": "walpost init"}
	cfg.Admin = admin
	if err := table.CheckDirect(ctx, table.Config{URL: admin.URL, Files: admin.Files}); err != nil {
		return nil, err
	}
	conn, err := table.Connect(ctx,
		table.Config{URL: admin.URL, Files: admin.Files, Settings: admin.Settings})
	if err != nil {
		return nil, err
	}
	s := &Setup{cfg: cfg, conn: conn}
	if err := s.read(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close closes the connection.
func (s *Setup) Close() { _ = s.conn.Close(context.Background()) }

// Server describes the server and the role that acts, for the plan's head.
func (s *Setup) Server() string {
	kind := ""
	if s.facts.Superuser {
		kind = ", a superuser"
	}
	text := fmt.Sprintf("PostgreSQL %s, database %s, as %s%s", s.facts.Version, s.facts.Database,
		s.facts.User, kind)
	if m := s.facts.managed; m != nil {
		text += ". It seems to be " + m.Name + ": see docs/MANAGED.md#" + m.Section
	}
	return text
}

// Database is the database's name.
func (s *Setup) Database() string { return s.facts.Database }

// Outbox is the first of the tables.
func (s *Setup) Outbox() *outbox.Table { return s.cfg.Outboxes[0] }

// Outboxes are the names of the tables.
func (s *Setup) Outboxes() (names []string) {
	for _, t := range s.cfg.Outboxes {
		names = append(names, t.String())
	}
	return names
}

// Role is the relay's.
func (s *Setup) Role() string { return s.cfg.Role }

// Owner is the role that has the tables, "" where it is the relay's.
func (s *Setup) Owner() string {
	if s.relayOwns() {
		return ""
	}
	return s.facts.Owner
}

// OwnersName is what the relay needs as postgres.owner: another relay's role, where walpost's tables are
// there and belong to it, and this relay's does not trust it without that. Such a role may read everything
// anyway.
func (s *Setup) OwnersName(ctx context.Context) (name string, err error) {
	own := pg.OwnOf(s.schema(), "", s.cfg.Outboxes)
	err = s.conn.QueryRow(ctx, `SELECT coalesce((
		SELECT r.rolname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			JOIN pg_roles r ON r.oid = c.relowner
		WHERE c.oid = to_regclass($1) AND r.rolreplication
			AND NOT `+pg.TrustedSQL("c", "n", "r", "$2", "$3", "$4")+`), '')`,
		own.Named(table.DeadLetters), s.cfg.Role, own.Schemas, own.Names).Scan(&name)
	return name, err
}

func (s *Setup) relayOwns() bool { return s.facts.Owner == s.cfg.Role }

// Restart says that the server has to be restarted before the relay can stream, once the plan is done; or "".
func (s *Setup) Restart() string {
	const until = ": until then the relay polls the table."
	switch {
	case s.cfg.Poll || s.facts.WALLevel == "logical":
		return ""
	case s.setsWALLevel():
		return "Restart PostgreSQL now, because wal_level is set" + until
	}
	return "Restart PostgreSQL when wal_level is set" + until
}

// Plan lists the steps in their order.
func (s *Setup) Plan(ctx context.Context) ([]*Step, error) {
	if err := table.CheckColumns(ctx, s.conn, s.cfg.Outboxes); err != nil {
		return nil, err
	}
	err := migrations.CheckOutboxes(ctx, s.conn, s.cfg.Outboxes, s.schema())
	if err != nil {
		return nil, err
	}
	var steps []*Step
	for _, part := range []func(context.Context) ([]*Step, error){
		s.wal, s.roles, s.places, s.tables, s.publication, s.grants, s.producer,
	} {
		some, err := part(ctx)
		if err != nil {
			return nil, err
		}
		steps = append(steps, some...)
	}
	return steps, nil
}

// Do does the steps that are not done yet, and calls each with every one that it has done. It stops at the
// first failure.
func (s *Setup) Do(ctx context.Context, steps []*Step, each func(n int)) error {
	for i, step := range steps {
		if step.Done || step.ByHand {
			continue
		}
		if err := step.do(ctx); err != nil {
			return hint.Wrap(fmt.Errorf("step %d: %w", i+1, err), advise(err))
		}
		crash.At("setup")
		each(i + 1)
	}
	return nil
}

// exec is a step of statements, as the connection's own role.
func (s *Setup) exec(why string, statements ...string) *Step {
	return &Step{Why: why, SQL: statements, do: func(ctx context.Context) error {
		return run(ctx, s.conn, statements...)
	}}
}

func run(ctx context.Context, conn *pgx.Conn, statements ...string) error {
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// schema has the tables.
func (s *Setup) schema() string { return cmp.Or(s.cfg.Schema, s.cfg.Outboxes[0].Schema) }

func (s *Setup) migrations() (*migrations.Runner, error) {
	cfg, err := pg.Parse(s.cfg.Admin)
	if err != nil {
		return nil, err
	}
	r := migrations.New(cfg, s.cfg.Outboxes, migrations.Relay)
	r.Own.Schema, r.Owner, r.SetUp = s.schema(), s.otherOwner(), true
	return r, nil
}

const theTables = "The tables: outbox, dead letters, archive, requests for replays, journal."

// tables makes walpost's tables.
func (s *Setup) tables(ctx context.Context) ([]*Step, error) {
	step := &Step{
		Why:       theTables,
		ScriptWhy: theTables,
		do: func(ctx context.Context) error {
			r, err := s.migrations()
			if err != nil {
				return err
			}
			defer r.Close() //nolint:errcheck // its statements have ended
			_, err = r.Up(ctx, migrations.Latest)
			return err
		},
	}
	missing, fresh, err := s.missingMigrations(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range missing {
		step.SQL = append(step.SQL, "-- migration "+m.Name)
	}
	step.Script = "-- walpost migrate up --only relay\n"
	if fresh {
		step.Script, err = s.tablesScript()
	}
	if step.Done = len(missing) == 0; step.Done {
		step.SQL = []string{"-- every migration of group relay"}
	} else {
		step.Why += " --print shows their SQL. They belong to " + s.facts.Owner + "."
	}
	return []*Step{step}, err
}

// tablesScript makes the tables in one transaction, in which their owner gets them last.
func (s *Setup) tablesScript() (string, error) {
	var b strings.Builder
	b.WriteString("BEGIN;\n")
	if s.facts.Superuser {
		b.WriteString(migrations.HoldSchemaSQL(s.schema()) + ";\n")
	}
	err := migrations.Print(&b, migrations.Latest, s.schema(), s.cfg.Outboxes, migrations.Relay)
	if owner := s.otherOwner(); err == nil && owner != "" {
		b.WriteByte('\n')
		err = migrations.PrintOwner(&b, owner, s.schema(), s.cfg.Outboxes)
	}
	b.WriteString("COMMIT;\n\n" + pg.ScriptHead)
	return b.String(), err
}

// otherOwner is the owner where it is another role than the connection's.
func (s *Setup) otherOwner() string {
	if s.facts.Owner == s.facts.User {
		return ""
	}
	return s.facts.Owner
}

// missingMigrations lists those that are to be applied, and reports whether none has been.
func (s *Setup) missingMigrations(
	ctx context.Context,
) (missing []migrations.Migration, fresh bool, err error) {
	if !s.facts.SchemaExists {
		return migrations.All(s.cfg.Outboxes, s.schema(), migrations.Relay), true, nil
	}
	r, err := s.migrations()
	if err != nil {
		return nil, false, err
	}
	defer r.Close() //nolint:errcheck // its statements have ended
	states, err := r.Status(ctx)
	if err != nil {
		return nil, false, err
	}
	for _, m := range states {
		if m.AppliedAt.IsZero() {
			missing = append(missing, m.Migration)
		}
	}
	if fresh = len(missing) == len(states); fresh {
		if there, err := s.madeByOthers(ctx); there || err != nil {
			return nil, false, err
		}
	}
	return missing, fresh, nil
}

// madeByOthers reports whether the tables are there, of which no migration is recorded: another tool has
// applied what `walpost migrate print` or `walpost init --print` wrote. Doctor finds what they lack.
func (s *Setup) madeByOthers(ctx context.Context) (there bool, err error) {
	if there, err = s.tablesExist(ctx); !there || err != nil {
		return false, err
	}
	letters := outbox.QuoteIdent(s.schema()) + "." + table.DeadLetters
	err = s.conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, letters).Scan(&there)
	return there, err
}

// publication creates the publication, or adds the tables that it lacks.
func (s *Setup) publication(ctx context.Context) ([]*Step, error) {
	if s.cfg.Poll {
		return nil, nil
	}
	name := s.cfg.Publication
	step := &Step{
		Why: "The publication: the slot brings the rows that are inserted into these tables.",
		SQL: []string{stream.PublicationSQL(name, s.cfg.Outboxes)},
		do: func(ctx context.Context) error {
			_, err := stream.EnsurePublication(ctx, s.conn, name, s.cfg.Outboxes)
			return err
		},
	}
	owner := ""
	if other := s.otherOwner(); other != "" {
		owner = fmt.Sprintf("ALTER PUBLICATION %s OWNER TO %s;\n",
			outbox.QuoteIdent(name), outbox.QuoteIdent(other))
	}
	if there, err := s.tablesExist(ctx); err != nil || !there {
		step.Script = stream.EnsurePublicationSQL(name, s.cfg.Outboxes) + ";\n" + owner
		return []*Step{step}, err
	}
	sql, err := stream.PlanPublication(ctx, s.conn, name, s.cfg.Outboxes)
	if err != nil {
		return nil, err
	}
	if step.Done = sql == ""; !step.Done {
		step.SQL = []string{sql}
	}
	if sql == stream.PublicationSQL(name, s.cfg.Outboxes) {
		step.Script = sql + ";\n" + owner
	}
	return []*Step{step}, nil
}

func (s *Setup) tablesExist(ctx context.Context) (there bool, err error) {
	there = true
	for _, t := range s.cfg.Outboxes {
		var exists bool
		err := s.conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, t.SQL()).Scan(&exists)
		if err != nil {
			return false, fmt.Errorf("look for %s: %w", t, err)
		}
		there = there && exists
	}
	return there, nil
}
