package drill

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
)

// Failover stops the primary and promotes a standby.
type Failover struct {
	// Standby reaches the standby, with the settings of Config.Postgres.
	Standby string
	// Stop is a command for sh -c that stops the primary, or cuts it off.
	Stop string
}

// Name is the command's.
func (Failover) Name() string { return "failover" }

// Check refuses a server that is no standby of this system, and a relay that would not find it.
func (f Failover) Check(ctx context.Context, d *Drill) error {
	if bad := d.withoutRecord(); bad != "" {
		return hint.Errorf("drill it with mark update or journal",
			"fail over: %s: no row would tell what the standby lacked", bad)
	}
	at, err := f.config(d)
	if err != nil {
		return err
	}
	if err := namesBoth(d.cfg.Postgres, at); err != nil {
		return err
	}
	conn, err := pg.ConnectConfig(ctx, at)
	if err != nil {
		return hint.Wrap(fmt.Errorf("--standby: %w", err), "check the URL; the standby has to be a hot one")
	}
	defer conn.Close(ctx) //nolint:errcheck // it was only asked
	return f.examine(ctx, d, conn)
}

func (f Failover) config(d *Drill) (*pgx.ConnConfig, error) {
	p := d.cfg.Postgres
	c := pg.Config{URL: f.Standby, Settings: p.Settings, Dial: p.Dial}
	c.Files.Password = p.Files.Password
	at, err := pg.Parse(c)
	if err != nil {
		return nil, fmt.Errorf("--standby: %w", err)
	}
	if len(hosts(at)) > 1 {
		return nil, hint.Errorf("name the standby alone", "--standby names several hosts")
	}
	return at, nil
}

func hosts(c *pgx.ConnConfig) []string {
	all := []string{address(c)}
	for _, f := range c.Fallbacks {
		all = append(all, net.JoinHostPort(f.Host, strconv.Itoa(int(f.Port))))
	}
	slices.Sort(all)
	return slices.Compact(all) // with TLS and without
}

func address(c *pgx.ConnConfig) string { return net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))) }

// namesBoth: the relay, and the drill, find the promoted server by postgres.url.
func namesBoth(p table.Config, standby *pgx.ConnConfig) error {
	c, err := pg.Parse(pg.Config{URL: p.URL, Files: p.Files})
	if err != nil {
		return err
	}
	all, at := hosts(c), address(standby)
	if !slices.Contains(all, at) {
		return hint.Errorf(fmt.Sprintf("have postgres.url name both, for the relay, too: "+
			"postgres://...@%s,%s/%s?target_session_attrs=read-write", all[0], at, c.Database),
			"postgres.url does not name the standby %s: the relay would not find it", at)
	}
	return nil
}

func (f Failover) examine(ctx context.Context, d *Drill, conn *pgx.Conn) error {
	var standby, may bool
	var database, theirs, ours string
	err := conn.QueryRow(ctx, `SELECT pg_is_in_recovery(), current_database()::text,
		has_function_privilege('pg_promote(boolean, integer)', 'EXECUTE')`).Scan(&standby, &database, &may)
	if err != nil {
		return fmt.Errorf("look at the standby: %w", err)
	}
	const system = `SELECT system_identifier::text FROM pg_control_system()`
	err = conn.QueryRow(ctx, system).Scan(&theirs)
	if err == nil {
		err = d.db.QueryRow(ctx, []any{&ours}, system)
	}
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		err = hint.Wrap(err, "GRANT EXECUTE ON FUNCTION pg_control_system() TO the role")
	}
	switch {
	case err != nil:
		return fmt.Errorf("read the system identifier: %w", err)
	case !standby:
		return hint.Errorf("name the standby that is to be promoted",
			"--standby %s is no standby", address(conn.Config()))
	case theirs != ours || database != d.report.Database:
		return hint.Errorf("name a standby of the server in postgres.url, and the same database",
			"--standby is database %s of system %s, and the relay's is %s of %s",
			database, theirs, d.report.Database, ours)
	case !may:
		return hint.Errorf("name a role that may in --standby; or, as a superuser of the primary: "+
			"GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer) TO the role",
			"promote the standby: role %s may not", conn.Config().User)
	}
	return streaming(ctx, conn)
}

func streaming(ctx context.Context, conn *pgx.Conn) error {
	var streams bool
	err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_wal_receiver)`).Scan(&streams)
	if err == nil && !streams {
		err = hint.Errorf("check primary_conninfo and the log of the standby",
			"the standby does not stream from its primary")
	}
	return err
}

// Inject stops the primary, sees that it is gone, and promotes the standby.
func (f Failover) Inject(ctx context.Context, d *Drill) error {
	if err := d.shell(ctx, "stop", f.Stop); err != nil {
		return err
	}
	if err := gone(ctx, d); err != nil {
		return err
	}
	at, err := f.config(d)
	if err != nil {
		return err
	}
	conn, err := pg.ConnectConfig(ctx, at)
	for err != nil && sleep.For(ctx, 200*time.Millisecond) { // it may just be starting
		conn, err = pg.ConnectConfig(ctx, at)
	}
	if err != nil {
		return fmt.Errorf("promote the standby: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // its statements have ended
	return promote(ctx, d, conn)
}

// gone is the fence: two primaries would both take writes. The session of before the stop has to be broken.
func gone(ctx context.Context, d *Drill) error {
	for begun := time.Now(); time.Since(begun) < pg.SessionTimeout; {
		asking, cancel := context.WithTimeout(ctx, pg.SessionTimeout)
		err := d.db.Ping(asking)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			d.step("the primary is gone: %v", err)
			return nil
		}
		sleep.For(ctx, 100*time.Millisecond)
	}
	return hint.Errorf("have --stop stop the primary, or cut it off, before it returns",
		"the primary still answers after --stop: nothing was promoted")
}

func promote(ctx context.Context, d *Drill, conn *pgx.Conn) error {
	var standby, done bool
	if err := conn.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil {
		return fmt.Errorf("promote the standby: %w", err)
	}
	if standby {
		err := conn.QueryRow(ctx, `SELECT pg_promote(true, 60)`).Scan(&done)
		if err == nil && !done {
			err = errors.New("it was not finished within 60s")
		}
		if err != nil {
			return fmt.Errorf("promote the standby: %w", err)
		}
		d.step("promoted the standby %s", address(conn.Config()))
	} else { // a failover manager was faster
		d.step("the standby %s is promoted already", address(conn.Config()))
	}
	d.report.Failover = &FailoverLoss{}
	var slots string
	const sql = `SELECT coalesce(current_setting('synchronized_standby_slots', true), '')`
	err := conn.QueryRow(ctx, sql).Scan(&slots)
	if err == nil && slots != "" {
		d.note("synchronized_standby_slots is %q on the promoted server: its walsenders wait for standbys "+
			"that it may not have; as a superuser: ALTER SYSTEM SET synchronized_standby_slots = ''; "+
			"SELECT pg_reload_conf()", slots)
	}
	d.note("the old primary must not come back as it is: make it a standby of the promoted server " +
		"(pg_rewind) before you start it")
	return nil
}
