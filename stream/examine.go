package stream

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Examination says what of a server is looked at.
type Examination struct {
	Slot        string
	Publication string
	Tables      []*outbox.Table
	// MaxRetainedWAL is how many bytes the slot may keep; 0 is no limit.
	MaxRetainedWAL int64
	// Held: a relay is at work, so that the slot may well be in use.
	Held bool
}

// oldTransaction is how long a transaction has been open that is worth a word.
const oldTransaction = 5 * time.Second

// Examine tells what a start does not refuse and an operator of a relay that streams
// should know: of the server's settings and the slot. It changes
// nothing, and each of its questions has a time limit of 30 s.
func Examine(ctx context.Context, conn *pgx.Conn, x Examination) (check.Findings, error) {
	e := &examiner{Examination: x, conn: conn}
	for _, look := range []func(context.Context) error{e.settings, e.slot, e.otherSlots} {
		ctx, cancel := context.WithTimeout(ctx, answerTimeout)
		err := look(ctx)
		cancel()
		if err != nil {
			return e.Findings, fmt.Errorf("examine the server: %w", err)
		}
	}
	return e.Findings, nil
}

type examiner struct {
	check.Findings
	Examination
	conn *pgx.Conn
}

func (e *examiner) settings(ctx context.Context) error {
	var keep, slotIdle int64
	var keepText, idleText, synchronous, standbySlots, budget string
	err := e.conn.QueryRow(ctx, `SELECT setting::bigint * 1048576, current_setting(name),
			coalesce((SELECT setting::bigint FROM pg_settings
				WHERE name = 'idle_replication_slot_timeout'), 0),
			coalesce(current_setting('idle_replication_slot_timeout', true), ''),
			current_setting('synchronous_standby_names'),
			coalesce(current_setting('synchronized_standby_slots', true), ''),
			pg_size_pretty($1::bigint)
		FROM pg_settings WHERE name = 'max_slot_wal_keep_size'`, e.MaxRetainedWAL).
		Scan(&keep, &keepText, &slotIdle, &idleText, &synchronous, &standbySlots, &budget)
	if err != nil {
		return err
	}
	switch {
	case keep < 0:
		e.Warning("pg-wal-unlimited",
			"ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf()",
			"max_slot_wal_keep_size is unlimited: while no relay runs, its slot keeps WAL until the disk is "+
				"full; set it to what the disk bears")
	case e.MaxRetainedWAL > 0 && keep <= e.MaxRetainedWAL:
		e.Warning("pg-wal-limit", "set postgres.max_retained_wal below max_slot_wal_keep_size",
			"max_slot_wal_keep_size is %s, and postgres.max_retained_wal %s: "+
				"the server invalidates the slot before the relay gives it up", keepText, budget)
	}
	if slotIdle > 0 {
		e.Warning("pg-idle-slot-timeout", "ALTER SYSTEM SET idle_replication_slot_timeout = 0, "+
			"or longer than a relay may be down; SELECT pg_reload_conf()",
			"idle_replication_slot_timeout is %s: "+
				"the server invalidates the slot of a relay that is down for so long", idleText)
	}
	if name := countsRelay(synchronous); name != "" {
		e.Fault("pg-synchronous-standby",
			"name the real standbys in synchronous_standby_names; SELECT pg_reload_conf()",
			"synchronous_standby_names has %s: "+
				"the relay would count as a synchronous standby, and nothing would be delivered", name)
	}
	return e.standbySlots(ctx, standbySlots)
}

var standbyName = regexp.MustCompile(`"[^"]*"|[^\s,()"]+`)

// countsRelay is the name among synchronous_standby_names that a relay answers to.
func countsRelay(names string) string {
	for _, name := range standbyName.FindAllString(names, -1) {
		if n := strings.Trim(name, `"`); n == "*" || strings.EqualFold(n, Settings["application_name"]) {
			return name
		}
	}
	return ""
}

// standbySlots looks for what alarm standby_slot would tell of.
func (e *examiner) standbySlots(ctx context.Context, names string) error {
	rows, _ := e.conn.Query(ctx, `SELECT trim(n) FROM regexp_split_to_table($1, ',') n
		LEFT JOIN pg_replication_slots s ON s.slot_name = trim(n)
		WHERE trim(n) <> '' AND s.active IS NOT TRUE`, names)
	unused, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, name := range unused {
		e.Fault("pg-standby-slot",
			"start the standby, or take its slot out of synchronized_standby_slots; SELECT pg_reload_conf()",
			"synchronized_standby_slots names %q, which no standby uses: "+
				"the server sends no WAL until one does", name)
	}
	return err
}

// otherSlots looks for slots of this database that a relay may have left, such as before postgres.slot was
// changed.
func (e *examiner) otherSlots(ctx context.Context) error {
	var name, kept string
	rows, _ := e.conn.Query(ctx, `SELECT s.slot_name::text,
			pg_size_pretty(coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0))
		FROM pg_replication_slots s
		WHERE s.plugin = 'pgoutput' AND s.database = current_database() AND NOT s.active AND NOT s.temporary
			AND s.slot_name <> ALL ($1::text[]::name[]) AND s.wal_status IS DISTINCT FROM 'lost'
		ORDER BY 1`, []string{e.Slot, NewSlotName(e.Slot)})
	_, err := pgx.ForEachRow(rows, []any{&name, &kept}, func() error {
		e.Warning("pg-slot-unused", fmt.Sprintf("start what reads it; if nothing does, as after "+
			"postgres.slot was changed: SELECT pg_drop_replication_slot(%s)", pg.QuoteLiteral(name)),
			"slot %q of this database is inactive, and keeps %s of WAL", name, kept)
		return nil
	})
	return err
}

// DescribeServer tells which server it is, and how many slots and walsenders are in
// use. It warns where a relay that begins to stream has hardly any left.
func DescribeServer(ctx context.Context, conn *pgx.Conn, begins bool) (f check.Findings, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var version, database, role string
	var slots, maxSlots, senders, maxSenders int
	err = conn.QueryRow(ctx, `SELECT current_setting('server_version'),
			current_database()::text, current_user::text,
			(SELECT count(*) FROM pg_replication_slots)::int, current_setting('max_replication_slots')::int,
			(SELECT count(*) FROM pg_stat_replication)::int, current_setting('max_wal_senders')::int`).
		Scan(&version, &database, &role, &slots, &maxSlots, &senders, &maxSenders)
	if err != nil {
		return nil, fmt.Errorf("describe the server: %w", err)
	}
	f.Note("pg-server", "",
		"PostgreSQL %s, database %q, role %q: %d of %d replication slots and %d of %d walsenders are in use",
		version, database, role, slots, maxSlots, senders, maxSenders)
	if pg.AnyBytes(conn.PgConn()) {
		f.Warning("pg-sql-ascii", "make a database with ENCODING 'UTF8' and move the tables there "+
			"(pg_dump --encoding, and convert what is no UTF-8)",
			"the database has the encoding SQL_ASCII, which is none: "+
				"it takes any bytes for text, and a row that is no UTF-8 is parked")
	}
	if begins && maxSenders-senders < 2 {
		f.Warning("pg-few-wal-senders", "raise max_wal_senders (needs a restart)",
			"%d of %d walsenders are in use: a relay takes one, and for moments a second one",
			senders, maxSenders)
	}
	managed, err := describeManaged(ctx, conn)
	return append(f, managed...), err
}

// slotState is what there is to know of the slot.
type slotState struct {
	Slot
	database string // of the connection
	pid      *int32
	kept     string
	over     bool // it keeps more than it may
	// newerThan: by its catalog_xmin, the slot may be older than the publication's last change. That is
	// no proof: a slot begins with the catalog_xmin of another one that lags, see passed.
	newerThan    bool
	flushed      string // an LSN behind the publication's last change
	retainedText string
}

func (e *examiner) readState(ctx context.Context) (s slotState, err error) {
	tables := make([]string, len(e.Tables))
	for i, t := range e.Tables {
		tables[i] = t.SQL()
	}
	s.Name = e.Slot
	err = e.conn.QueryRow(ctx, `SELECT coalesce(s.plugin, '')::text, coalesce(s.database, '')::text,
			coalesce(s.wal_status, ''), s.temporary, s.two_phase,
			current_database()::text, s.active_pid,
			pg_size_pretty(coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)),
			pg_size_pretty($2::bigint),
			coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0) > $2::bigint AND $2::bigint > 0,
			EXISTS (SELECT FROM pg_publication p LEFT JOIN pg_publication_rel r
				ON r.prpubid = p.oid AND r.prrelid = ANY (SELECT to_regclass(t) FROM unnest($4::text[]) t)
				WHERE p.pubname = $3
					AND (age(p.xmin) <= age(s.catalog_xmin) OR age(r.xmin) <= age(s.catalog_xmin)))
				AND NOT EXISTS (SELECT FROM pg_replication_slots o
					WHERE o.slot_name <> s.slot_name AND age(o.catalog_xmin) >= age(s.catalog_xmin)),
			pg_current_wal_flush_lsn()::text
		FROM pg_replication_slots s WHERE s.slot_name = $1`, e.Slot, e.MaxRetainedWAL, e.Publication, tables).
		Scan(&s.Plugin, &s.Database, &s.WALStatus, &s.temporary, &s.twoPhase, &s.database, &s.pid,
			&s.kept, &s.retainedText, &s.over, &s.newerThan, &s.flushed)
	if errors.Is(err, pgx.ErrNoRows) {
		return s, ErrNoSlot
	}
	return s, err
}

func (e *examiner) slot(ctx context.Context) error {
	s, err := e.readState(ctx)
	if errors.Is(err, ErrNoSlot) {
		e.Note("slot-missing", "", "slot %q does not exist: a start makes it", e.Slot)
		return e.waits(ctx)
	}
	if err != nil {
		return err
	}
	if err := s.check(s.database); errors.Is(err, ErrSlotLost) {
		return e.lost(ctx, err)
	} else if err != nil {
		return nil // Probe reports it
	}
	e.use(s)
	if err := e.inTheWay(ctx); err != nil {
		return err
	}
	if s.over {
		e.Warning("slot-over-budget", "have the relay run and keep up, or raise postgres.max_retained_wal",
			"slot %q keeps %s of WAL, more than postgres.max_retained_wal (%s): "+
				"the relay gives it up, and the table delivers", e.Slot, s.kept, s.retainedText)
	}
	if s.WALStatus == "unreserved" {
		e.Warning("slot-unreserved", "start the relay now, and raise max_slot_wal_keep_size",
			"slot %q keeps %s of WAL, more than max_slot_wal_keep_size: "+
				"the next checkpoint may invalidate it", e.Slot, s.kept)
	}
	if !s.newerThan {
		return nil
	}
	passed, err := e.passed(ctx, s)
	if err == nil && !passed {
		e.Warning("publication-newer",
			"nothing, if no row is missing; never drop or change a publication while its slot lives",
			"publication %q was made or changed after what slot %q has confirmed: "+
				"changes in between are not decoded, and the slot may have to be recreated",
			e.Publication, e.Slot)
	}
	return err
}

// passed reports whether the slot has confirmed the publication's last change. It gives who streams it
// three seconds: an idle relay confirms once a second.
func (e *examiner) passed(ctx context.Context, s slotState) (passed bool, err error) {
	for range 30 {
		err = e.conn.QueryRow(ctx, `SELECT coalesce(confirmed_flush_lsn >= $2::text::pg_lsn, false)
			FROM pg_replication_slots WHERE slot_name = $1`, e.Slot, s.flushed).Scan(&passed)
		if errors.Is(err, pgx.ErrNoRows) {
			return true, nil // it was dropped meanwhile
		}
		if err != nil || passed || s.pid == nil {
			return passed, err
		}
		if _, err := e.conn.Exec(ctx, "SELECT pg_sleep(0.1)"); err != nil {
			return false, err
		}
	}
	return false, nil
}

// use tells who streams the slot.
func (e *examiner) use(s slotState) {
	switch {
	case s.pid == nil:
		e.Note("slot-idle", "", "slot %q keeps %s of WAL, and nobody streams it", e.Slot, s.kept)
	case e.Held:
		e.Note("slot-active", "", "slot %q keeps %s of WAL, and the relay streams it", e.Slot, s.kept)
	default:
		e.Fault("slot-in-use",
			fmt.Sprintf("end it (SELECT pg_terminate_backend(%d)), and give it a slot of its own", *s.pid),
			"process %d, which is no relay, streams slot %q: nothing would be delivered", *s.pid, e.Slot)
	}
}

func (e *examiner) lost(ctx context.Context, cause error) error {
	e.Warning("slot-lost", "start the relay: it recreates the slot",
		"%s: the table delivers what it would have brought", cause)
	return e.waits(ctx)
}

func (e *examiner) inTheWay(ctx context.Context) error {
	var exists bool
	name := NewSlotName(e.Slot)
	err := e.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_replication_slots
		WHERE slot_name::text = $1 AND NOT temporary)`, name).Scan(&exists)
	if exists {
		e.Warning("slot-unfinished", dropHint(name),
			"slot %q is there: a relay needs that name whenever it recreates its slot", name)
	}
	return err
}

// waits names what a slot that has to be made would wait for. Other roles' transactions
// are only seen by one with pg_read_all_stats.
func (e *examiner) waits(ctx context.Context) error {
	rows, _ := e.conn.Query(ctx, `SELECT format('prepared transaction %L of database %L, since %s',
				gid, database, prepared::timestamptz(0)),
			'COMMIT PREPARED or ROLLBACK PREPARED ' || quote_literal(gid) || ', in that database', true
		FROM pg_prepared_xacts
		UNION ALL SELECT format('pid %s, user %L, database %L, in its transaction since %s',
				pid, usename, datname, xact_start::timestamptz(0)),
			format('end it: SELECT pg_terminate_backend(%s)', pid), false FROM pg_stat_activity
		WHERE backend_xid IS NOT NULL AND clock_timestamp() - xact_start > $1`, oldTransaction)
	var who, fix string
	var prepared bool
	_, err := pgx.ForEachRow(rows, []any{&who, &fix, &prepared}, func() error {
		const text = "the creation of the slot would wait for %s"
		if prepared {
			e.Warning("pg-prepared-transaction", fix, text, who)
		} else {
			e.Warning("pg-old-transaction", fix, text, who)
		}
		return nil
	})
	return err
}
