// Package retention moves processed rows to the archive, creates and drops the archive's months, and deletes
// expired idempotency keys. A pass opens its own connection, and works beside a relay or without one.
package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/keys"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Options say what a pass of retention keeps, and for how long.
type Options struct {
	Tables []*outbox.Table
	// ArchiveAfter is how long after it was processed a row moves to the archive.
	// 0: no row moves.
	ArchiveAfter time.Duration
	// DeleteAfter is how long after it was processed a row is deleted from an outbox that has no archive, as
	// its layout is not the canonical one. 0: no row is deleted.
	DeleteAfter time.Duration
	// ExcludedAfter is how long after its occurred_at a row goes with its partition that no relay has
	// delivered because its outbox's condition excludes it. 0: such a row keeps its partition.
	ExcludedAfter time.Duration
	// DropAfter is how long after it was processed a row may leave the archive; at
	// least ArchiveAfter. 0: the archive keeps everything.
	DropAfter time.Duration
	// Progress may be nil. It is called after each batch, and must not keep the report.
	Progress func(*Report)
}

// Report is what a pass has done.
type Report struct {
	// Busy: another pass was running, so this one did nothing.
	Busy    bool          `json:"busy"`
	Tables  []TableReport `json:"tables"`
	Created []string      `json:"created"` // partitions: months of the archive, ids of an outbox
	Dropped []string      `json:"dropped"` // as Created
	// Kept are partitions whose time has come, and that have rows which no relay has delivered.
	Kept        []Kept `json:"kept"`
	Purged      int64  `json:"purged"`       // rows of the archive's default partition
	ExpiredKeys int64  `json:"expired_keys"` // idempotency keys
	// Notes say what was left undone, and why.
	Notes []string `json:"notes"`
	// HasKeys: there are idempotency keys. Purges: the archive has a default partition, whose old rows are
	// deleted.
	HasKeys bool `json:"-"`
	Purges  bool `json:"-"`
}

// Complaints are the obstacles that an operator has to remove before a pass can do all its work. A missing
// table is a choice, and so is an outbox that is not archived: neither is listed.
func (r *Report) Complaints() []string {
	var all []string
	for _, t := range r.Tables {
		if t.Obstacle {
			all = append(all, fmt.Sprintf("%s keeps its processed rows: %s", t.Table, t.Skipped))
		}
	}
	return append(all, r.Notes...)
}

// TableReport is what a pass has done with one outbox.
type TableReport struct {
	Table    string `json:"table"`
	Archived int64  `json:"archived"`
	Deleted  int64  `json:"deleted"` // of an outbox without an archive
	// Refused are rows that were left behind because they cannot be archived.
	Refused int64 `json:"refused,omitempty"`
	// Skipped is why nothing was looked for, or empty.
	Skipped string `json:"skipped,omitempty"`
	// Obstacle: the configuration wants it archived, and the schema does not let it.
	Obstacle bool `json:"obstacle,omitempty"`
}

// Kept is a partition of an append-only outbox whose time has come, and that a pass has not dropped: no relay
// has delivered some of its rows, as the outbox's condition excludes them, or another condition's progress
// has not come so far.
type Kept struct {
	Partition string  `json:"partition"`
	Rows      int64   `json:"rows"`             // counted up to 1000
	First     int64   `json:"first_id"`         // of them
	Behind    *string `json:"behind,omitempty"` // the other condition
}

// known reports whether it is told what keeps the partition.
func (k Kept) known() bool { return k.Rows > 0 || k.Behind != nil }

func (k Kept) String() string {
	if k.Behind != nil {
		return fmt.Sprintf("%s is kept, and later ones: the progress of outboxes[].where %q has not come "+
			"so far (if no relay has that any more, its row of outbox_known may go)", k.Partition, *k.Behind)
	}
	rows := fmt.Sprint(k.Rows)
	if k.Rows == mostKept {
		rows += " or more"
	}
	return fmt.Sprintf("%s is kept: no relay has delivered %s of its rows, from id %d on, "+
		"as outboxes[].where excludes them (retention.excluded_after says when they go)",
		k.Partition, rows, k.First)
}

// Fix is what has it dropped.
func (k Kept) Fix(t *outbox.Table) string {
	if k.Behind != nil {
		return fmt.Sprintf("if no relay has that condition any more: DELETE FROM %s WHERE outbox = %s "+
			"AND condition = %s", t.Journal.Known, pg.QuoteLiteral(t.String()), pg.QuoteLiteral(*k.Behind))
	}
	return "set retention.excluded_after"
}

// Run makes one pass: processed rows move from their outboxes to the archive,
// months of the archive are created ahead and dropped when they are old, and
// expired idempotency keys are deleted.
//
// A row that is not processed is never touched. Each batch is one transaction: a pass may end anywhere, and
// the next one goes on from there. It waits half a second at most for a lock. Work behind a lock that it did
// not get is left to the next pass, with a note and without an error. Only one pass runs at a time in a
// database. Only a constraint that refuses rows is taken away for as long as it takes, ten minutes at most.
//
// The report is returned beside any error. A pass goes on after an error that concerns one table only. When
// ctx is done it ends at once: the present batch is rolled back.
func Run(ctx context.Context, cfg table.Config, opts Options) (*Report, error) {
	r := &pass{opts: opts}
	r.opts.Tables = make([]*outbox.Table, len(opts.Tables))
	for i, t := range opts.Tables {
		own := *t // a relay reads its own
		r.opts.Tables[i] = &own
	}
	r.report = &Report{
		Tables: []TableReport{}, Created: []string{}, Dropped: []string{}, Kept: []Kept{}, Notes: []string{},
	}
	if opts.DropAfter > 0 && opts.DropAfter < opts.ArchiveAfter {
		return r.report, fmt.Errorf("drop the archive after %s: rows only come to it after %s",
			opts.DropAfter, opts.ArchiveAfter)
	}
	db, err := table.Open(ctx, cfg)
	if err != nil {
		return r.report, err
	}
	defer db.Close()
	r.db = db
	if err := r.begin(ctx, cfg.Own); err != nil || r.report.Busy {
		return r.report, err
	}
	defer r.end(ctx)
	var all []error
	parts := []func(context.Context) error{r.findArchive, r.archiveRows, r.purgeArchive, r.expireKeys}
	for _, part := range parts {
		all = append(all, part(ctx))
		if ctx.Err() != nil || !db.Alive() {
			break
		}
	}
	err = errors.Join(r.withoutPrivileges(flat(all))...)
	if err == nil && ctx.Err() != nil { // ctx ended between two statements
		err = fmt.Errorf("finish pass: %w", ctx.Err())
	}
	return r.report, err
}

// pass is one run of retention. Nothing else uses its connection.
type pass struct {
	db      *table.DB
	tables  ownTables
	opts    Options
	report  *Report
	now     time.Time // the database's clock when the pass began
	role    string    // our own, quoted
	archive *monthly  // nil where there is none
}

// ownTables are walpost's tables with the schemas in which the connection found them, quoted.
type ownTables struct{ archive, keys string }

func (r *pass) findTables(ctx context.Context, where pg.Own) error {
	return r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		found, err := where.Find(ctx, conn, table.Archive, keys.Table)
		if err == nil {
			r.tables = ownTables{found[0], found[1]}
		}
		return err
	})
}

// statementLimit bounds a statement. A batch takes hundredths of a second.
const statementLimit = 20 * time.Second

func (r *pass) begin(ctx context.Context, where pg.Own) error {
	// A cancelled statement may end this connection: its lock is not the relay's. A crash of the server may
	// roll the last batches back: the next pass moves them again.
	err := r.db.Unbind(ctx)
	if err == nil {
		err = r.db.Limit(ctx, statementLimit)
	}
	if err != nil {
		return fmt.Errorf("prepare session: %w", err)
	}
	if err = r.findTables(ctx, where); err != nil {
		return err
	}
	if err := r.db.Bind(ctx, r.opts.Tables...); err != nil {
		return err
	}
	// A batch is read from an index in its order, whatever the statistics say: any other plan reads the whole
	// backlog for each batch.
	err = r.exec(ctx, `SET default_transaction_isolation = 'read committed'; SET timezone = 'UTC';
		SET enable_bitmapscan = off; SET enable_sort = off; SET plan_cache_mode = force_custom_plan`)
	if err != nil {
		return fmt.Errorf("prepare session: %w", err)
	}
	var locked, readOnly bool
	err = r.db.QueryRow(ctx, []any{&locked, &r.now, &readOnly, &r.role}, `
		SELECT pg_try_advisory_lock(hashtextextended('walpost/retention', 0)), now(),
			current_setting('transaction_read_only')::bool, quote_ident(current_user)`)
	if err != nil {
		return fmt.Errorf("take advisory lock: %w", err)
	}
	if readOnly {
		return hint.Errorf("point postgres.url at the primary",
			"archive rows: this server is a standby or read-only")
	}
	r.now = r.now.UTC()
	r.report.Busy = !locked
	return nil
}

// end releases the lock. Closing the connection would release it a moment later, and the next pass may begin
// at once.
func (r *pass) end(ctx context.Context) {
	_ = r.exec(context.WithoutCancel(ctx), `SELECT pg_advisory_unlock_all()`)
}

func (r *pass) exec(ctx context.Context, sql string) error {
	return r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql)
		return err
	})
}

func (r *pass) note(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(r.report.Notes, s) {
		r.report.Notes = append(r.report.Notes, s)
	}
}

// settle turns a failure that the next pass may not meet into a note.
func (r *pass) settle(err error) error {
	tooLong := pg.Code(err) == pgerrcode.QueryCanceled
	if !pg.IsBlocked(err) && !tooLong {
		return err
	}
	r.note("left to the next pass: %v", err)
	return nil
}

// exists reports whether one of walpost's tables exists. To do without it is a choice, of which nothing is
// said.
func (r *pass) exists(ctx context.Context, name, qualified string) (has bool, err error) {
	err = r.db.QueryRow(ctx, []any{&has}, `SELECT to_regclass($1) IS NOT NULL`, qualified)
	if err != nil {
		return false, fmt.Errorf("look for %s: %w", name, err)
	}
	return has, nil
}

func (r *pass) expireKeys(ctx context.Context) error {
	has, err := r.exists(ctx, keys.Table, r.tables.keys)
	if r.report.HasKeys = has; err != nil || !has {
		return err
	}
	expired := sweep{
		from: r.tables.keys, before: r.now, count: &r.report.ExpiredKeys,
		batch: keys.PurgeSQL(r.tables.keys, pg.OwnPath),
	}
	err = r.sweep(ctx, expired)
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		if others, failed := r.othersKeys(ctx); others || failed != nil {
			r.report.HasKeys = false
			return failed
		}
		err = hint.Wrap(err, "as the owner: GRANT SELECT, UPDATE, DELETE ON "+keys.Table+" TO "+r.role)
	}
	if err != nil {
		return r.settle(fmt.Errorf("delete expired idempotency keys: %w", err))
	}
	return nil
}

// othersKeys reports whether the role of another relay, which may stream, deletes the keys.
func (r *pass) othersKeys(ctx context.Context) (others bool, err error) {
	err = r.db.QueryRow(ctx, []any{&others}, `SELECT EXISTS (SELECT FROM pg_roles
		WHERE rolcanlogin AND rolreplication AND NOT rolsuper AND rolname <> current_user
			AND has_table_privilege(oid, to_regclass($1), 'SELECT')
			AND has_table_privilege(oid, to_regclass($1), 'UPDATE')
			AND has_table_privilege(oid, to_regclass($1), 'DELETE'))`, r.tables.keys)
	if err != nil {
		return false, fmt.Errorf("look for who deletes idempotency keys: %w", err)
	}
	return others, nil
}
