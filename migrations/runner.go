package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// lockID keeps runners of walpost apart from each other and from an application's own goose. It spells
// "walpost".
const lockID int64 = 0x77616c706f7374

// Runner applies the migrations to one database. Several runners, also of several processes, may work at the
// same time: an advisory lock has them take turns, for at most a minute.
type Runner struct {
	cfg      *pgx.ConnConfig
	db       *sql.DB
	outboxes []*outbox.Table
	only     []Group
}

// Applied is a migration that a run applied or took back.
type Applied struct {
	Migration
	Duration time.Duration
}

// State is a migration as the database has it.
type State struct {
	Migration
	// AppliedAt is zero where it was not applied.
	AppliedAt time.Time
	// Skipped is set where up leaves it out: the outbox is another table.
	Skipped bool
	// OtherGroup is set where the database has no migration of this one's group, but has some of another: a
	// consumer's database has no outbox. Up applies it, unless it is told the groups.
	OtherGroup bool
}

// New prepares a runner and does not connect. The tables are made in the first schema of the connection's
// search_path; outbox_messages and outbox_events only where one of the outboxes is that very table in the
// canonical layout, or in layout append, the others always. Where groups are named, the runner knows the
// migrations of these and no others: it applies none of the others, takes none of them back and lists none.
func New(cfg *pgx.ConnConfig, outboxes []*outbox.Table, only ...Group) *Runner {
	cfg = cfg.Copy()
	// goose records the time in a column without time zone.
	cfg.RuntimeParams["timezone"] = "UTC"
	pg.Protect(&cfg.Config)
	return &Runner{cfg: cfg, db: stdlib.OpenDB(*cfg), outboxes: outboxes, only: only}
}

// Close closes the connections.
func (r *Runner) Close() error { return r.db.Close() }

// Up applies what is missing up to and including the version, or [Latest], each migration in a transaction of
// its own. It returns those that it applied, also beside an error.
func (r *Runner) Up(ctx context.Context, to int64) ([]Applied, error) {
	if to != Latest {
		if err := checkTarget(to, 1, r.only); err != nil {
			return nil, err
		}
	}
	schema, err := r.schema(ctx)
	if err == nil {
		err = checkVersionTable(ctx, r.db, schema)
	}
	if err != nil {
		return nil, explain(err)
	}
	p, err := r.provider(schema, r.excluded(schema))
	if err != nil {
		return nil, err
	}
	done, err := p.UpTo(ctx, to)
	return applied(done, err), explain(err)
}

// Down reverts the migrations above the version, the highest first, or with [OneStep] the highest one. It
// reverts nothing where one of the tables still holds undelivered or unexpired rows, or consumers' positions.
func (r *Runner) Down(ctx context.Context, to int64) ([]Applied, error) {
	if to != OneStep {
		if err := checkTarget(to, 0, r.only); err != nil {
			return nil, err
		}
	}
	states, err := r.Status(ctx)
	if err != nil {
		return nil, err
	}
	if to == OneStep {
		to = lastApplied(states) - 1
	}
	if to < 0 || lastApplied(states) <= to {
		// A database that was never migrated gets no version table from taking nothing back.
		return nil, nil
	}
	schema, err := r.schema(ctx)
	if err == nil {
		err = checkVersionTable(ctx, r.db, schema)
	}
	if err != nil {
		return nil, explain(err)
	}
	states = slices.DeleteFunc(states, func(s State) bool { return s.Version <= to || s.AppliedAt.IsZero() })
	slices.Reverse(states)
	for _, s := range states {
		question := inSchema{schema}.place(guard(s.Name))
		if question == "" {
			continue
		}
		if _, err := r.db.ExecContext(ctx, question); err != nil {
			return nil, explain(fmt.Errorf("take back %s: %w", s.Name, err))
		}
	}
	done, err := r.takeBack(ctx, schema, states)
	return done, explain(err)
}

// takeBack goes by the versions. goose's DownTo goes by the order in which they were applied and stops at the
// first that stays, which need not be the last: a group can be applied after another.
func (r *Runner) takeBack(ctx context.Context, schema string, states []State) (done []Applied, err error) {
	p, err := r.provider(schema, nil)
	if err != nil {
		return nil, err
	}
	for _, s := range states {
		result, err := p.ApplyVersion(ctx, s.Version, false)
		if errors.Is(err, goose.ErrNotApplied) {
			continue // another runner took it back meanwhile
		}
		if err != nil {
			return done, err
		}
		done = append(done, Applied{Migration: s.Migration, Duration: result.Duration})
	}
	return done, nil
}

// guard is the question that a file asks in its Down section before it drops its table, empty where it asks
// none.
func guard(file string) string {
	text, err := files.ReadFile(file)
	if err != nil {
		panic(err)
	}
	_, down, _ := strings.Cut(string(text), "-- +goose Down")
	_, question, _ := strings.Cut(down, "-- +goose StatementBegin")
	question, _, _ = strings.Cut(question, "-- +goose StatementEnd")
	return question
}

func lastApplied(states []State) int64 {
	var last int64
	for _, s := range states {
		if !s.AppliedAt.IsZero() {
			last = s.Version
		}
	}
	return last
}

// Status lists the migrations. It only reads: a database that was never migrated stays untouched.
func (r *Runner) Status(ctx context.Context) ([]State, error) {
	schema, err := r.schema(ctx)
	if err != nil {
		return nil, explain(err)
	}
	at, err := r.appliedAt(ctx, schema)
	if err != nil {
		return nil, explain(fmt.Errorf("read which migrations are applied: %w", err))
	}
	here := map[Group]bool{}
	for _, m := range All() {
		if !at[m.Version].IsZero() {
			here[m.Group] = true
		}
	}
	skip := r.skipped(schema)
	var states []State
	for _, m := range of(r.only) {
		s := State{Migration: m, AppliedAt: at[m.Version]}
		s.Skipped = s.AppliedAt.IsZero() && slices.Contains(skip, m.Version)
		s.OtherGroup = len(here) > 0 && !here[m.Group]
		states = append(states, s)
	}
	return states, nil
}

// appliedAt asks the table itself, because goose would create it in order to ask.
func (r *Runner) appliedAt(ctx context.Context, schema string) (map[int64]time.Time, error) {
	var exists bool
	err := r.db.QueryRowContext(ctx, `SELECT to_regclass($1) IS NOT NULL`, versionTable(schema)).Scan(&exists)
	if err != nil || !exists {
		return nil, err
	}
	rows, err := r.db.QueryContext(ctx,
		`SELECT version_id, tstamp FROM `+versionTable(schema)+` WHERE is_applied ORDER BY id`)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err says what went wrong
	at := map[int64]time.Time{}
	for rows.Next() {
		var version int64
		var t time.Time
		if err := rows.Scan(&version, &t); err != nil {
			return nil, err
		}
		at[version] = t.UTC()
	}
	return at, rows.Err()
}

// skipped lists the versions that a schema is not to get.
func (r *Runner) skipped(schema string) (versions []int64) {
	for version := range ownTables {
		if leftOut(version, r.outboxes, schema) {
			versions = append(versions, version)
		}
	}
	return versions
}

// excluded lists the versions that up leaves out: those that are skipped, and those of other groups.
func (r *Runner) excluded(schema string) (versions []int64) {
	mine, skip := of(r.only), r.skipped(schema)
	for _, m := range All() {
		if !slices.Contains(mine, m) || slices.Contains(skip, m.Version) {
			versions = append(versions, m.Version)
		}
	}
	return versions
}

func (r *Runner) provider(schema string, exclude []int64) (*goose.Provider, error) {
	// A second between attempts, sixty of them: the migrations themselves take some hundredths.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(lockID), lock.WithLockTimeout(1, 60))
	if err != nil {
		return nil, fmt.Errorf("prepare migration lock: %w", err)
	}
	store, err := versions(schema)
	if err != nil {
		return nil, fmt.Errorf("prepare migrations: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectCustom, r.db, inSchema{schema},
		goose.WithStore(store),
		goose.WithSessionLocker(patientLocker{locker}),
		goose.WithDisableGlobalRegistry(true), // this database is not the application's goose
		goose.WithLogger(goose.NopLogger()),
		goose.WithExcludeVersions(exclude),
		// The outbox can become the canonical one later, and a database can get another group: then number 1
		// is applied after the others.
		goose.WithAllowOutofOrder(true))
	if err != nil {
		return nil, fmt.Errorf("prepare migrations: %w", err)
	}
	return p, nil
}

// patientLocker says what it has waited for in vain.
type patientLocker struct{ lock.SessionLocker }

func (l patientLocker) SessionLock(ctx context.Context, conn *sql.Conn) error {
	err := l.SessionLocker.SessionLock(ctx, conn)
	return hint.Wrap(err, "another `walpost migrate` holds the advisory lock: "+
		"see pg_locks (locktype advisory) and pg_stat_activity")
}

// applied also finds what a failed run did before it failed.
func applied(done []*goose.MigrationResult, err error) []Applied {
	var partial *goose.PartialError
	if errors.As(err, &partial) {
		done = partial.Applied
	}
	out := make([]Applied, len(done))
	for i, d := range done {
		v := d.Source.Version
		out[i].Migration = Migration{Version: v, Name: path.Base(d.Source.Path), Group: groupOf(v)}
		out[i].Duration = d.Duration
	}
	return out
}
