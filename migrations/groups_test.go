package migrations_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

func newGroupRunner(t *testing.T, url string, only ...migrations.Group) *migrations.Runner {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	r := migrations.New(cfg, outboxes(), only...)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// all are the migrations of the groups, or of every group, for both outboxes.
func all(only ...migrations.Group) []migrations.Migration {
	return migrations.All(outboxes(), "public", only...)
}

// names are the migrations' files.
func names(ms []migrations.Migration) (all []string) {
	for _, m := range ms {
		all = append(all, m.Name)
	}
	return all
}

func appliedNames(done []migrations.Applied) (all []string) {
	for _, d := range done {
		all = append(all, d.Name)
	}
	return all
}

// Groups are independent: in any order, each applies its own, and all of them make the same schema.
func TestGroupsInAnyOrder(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	whole := pg.NewDB(t)
	if _, err := newRunner(t, whole, outboxes()).Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	want := catalog(t, connect(t, whole))
	forward := migrations.Groups()
	backward := slices.Clone(forward)
	slices.Reverse(backward)
	for _, order := range [][]migrations.Group{forward, backward} {
		url := pg.NewDB(t)
		conn := connect(t, url)
		before := []string{catalog(t, conn)}
		for _, g := range order {
			done, err := newGroupRunner(t, url, g).Up(t.Context(), migrations.Latest)
			if err != nil || !slices.Equal(appliedNames(done), names(all(g))) {
				t.Fatalf("up of %s = %+v, %v", g, done, err)
			}
			before = append(before, catalog(t, conn))
		}
		if got := before[len(order)]; got != want {
			t.Errorf("the groups make\n%s\nup makes\n%s", got, want)
		}
		for i, g := range slices.Backward(order) {
			done, err := newGroupRunner(t, url, g).Down(t.Context(), 0)
			want := names(all(g))
			slices.Reverse(want)
			if err != nil || !slices.Equal(appliedNames(done), want) {
				t.Fatalf("down of %s = %+v, %v", g, done, err)
			}
			if got := catalog(t, conn); got != before[i] {
				t.Errorf("down of %s leaves\n%s\nwant\n%s", g, got, before[i])
			}
		}
	}
}

// Down takes back what was applied last, whatever its group.
func TestDownAfterGroups(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	for _, g := range []migrations.Group{migrations.Consumer, migrations.Relay, migrations.Idempotency} {
		if _, err := newGroupRunner(t, url, g).Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
	}
	r := newRunner(t, url, outboxes())
	for _, want := range []string{
		"idempotency/0001_table.sql", "outbox_events/0001_table.sql", "outbox_messages/0001_table.sql", "relay/0001_tables.sql",
		"consumer/0001_tables.sql",
	} {
		done, err := r.Down(t.Context(), migrations.OneStep)
		if err != nil || !slices.Equal(appliedNames(done), []string{want}) {
			t.Fatalf("down = %q, %v, want %s", appliedNames(done), err, want)
		}
	}
}

func TestStatusOfGroups(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	r, consumer := newRunner(t, url, outboxes()), newGroupRunner(t, url, migrations.Consumer)
	status := func(r *migrations.Runner) (out string) {
		states, err := r.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range states {
			if s.AppliedAt.IsZero() {
				out += "pending "
			}
			out += s.Name + "\n"
		}
		return out
	}
	nothing := "pending " + strings.Join(names(all()), "\npending ") + "\n"
	if got := status(r); got != nothing {
		t.Errorf("before anything: %s", got)
	}
	if _, err := consumer.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	if got := status(r); got != strings.Replace(nothing, "pending consumer", "consumer", 1) {
		t.Errorf("with the consumer's: %s", got)
	}
	if got := status(consumer); got != "consumer/0001_tables.sql\n" {
		t.Errorf("of the consumer: %s", got)
	}
	if _, err := consumer.Down(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if got := status(r); got != nothing {
		t.Errorf("after everything: %s", got)
	}
}

// Each group counts its own versions: a number without a group, or one that no file has, means nothing.
func TestUnknownVersion(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	whole, group := newRunner(t, url, outboxes()), newGroupRunner(t, url, migrations.Consumer)
	_, up := group.Up(t.Context(), 99)
	_, zero := group.Up(t.Context(), 0)
	_, down := group.Down(t.Context(), 99)
	_, some := whole.Up(t.Context(), 1)
	printed := migrations.Print(&bytes.Buffer{}, 99, "public", outboxes(), migrations.Consumer)
	for want, errs := range map[string][]error{"in group consumer": {up, zero, down, printed}, "without a group": {some}} {
		for _, err := range errs {
			if !errors.Is(err, migrations.ErrNoVersion) || !strings.Contains(err.Error(), want) || hint.Of(err) == "" {
				t.Errorf("error = %v, hint %q", err, hint.Of(err))
			}
		}
	}
	if _, err := whole.Down(t.Context(), 0); err != nil {
		t.Errorf("down to nothing: %v", err)
	}
}

// A role that does not own walpost's tables, such as the relay's, learns whose URL to use.
func TestMigratedByAnotherRole(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	url := pg.NewDB(t)
	exec(t, connect(t, url), `CREATE ROLE tables_owner LOGIN; CREATE ROLE tables_user LOGIN; GRANT CREATE ON SCHEMA public TO tables_owner`)
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	owner := newGroupRunner(t, pg.URLFor("tables_owner", cfg.Database), migrations.Idempotency)
	if _, err := owner.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	user := newGroupRunner(t, pg.URLFor("tables_user", cfg.Database), migrations.Idempotency)
	_, up := user.Up(t.Context(), migrations.Latest)
	_, down := user.Down(t.Context(), 0)
	_, status := user.Status(t.Context())
	for _, err := range []error{up, down, status} {
		if err == nil || !strings.Contains(err.Error(), `belongs to role "tables_owner"`) || !strings.Contains(hint.Of(err), `a URL of role "tables_owner"`) {
			t.Errorf("error %v, hint %q", err, hint.Of(err))
		}
	}
}

// Each group's SQL makes what its up makes.
func TestPrintOfGroups(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	for _, g := range migrations.Groups() {
		var sql bytes.Buffer
		if err := migrations.Print(&sql, migrations.Latest, "public", outboxes(), g); err != nil {
			t.Fatal(err)
		}
		printed, upped := pg.NewDB(t), pg.NewDB(t)
		conn := connect(t, printed)
		exec(t, conn, sql.String())
		if _, err := newGroupRunner(t, upped, g).Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
		if got, want := catalog(t, conn), catalog(t, connect(t, upped)); got != want {
			t.Errorf("print of %s makes\n%s\nup makes\n%s", g, got, want)
		}
	}
}

// The columns are a contract with consumers in every language.
func TestConsumerColumns(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	if _, err := newGroupRunner(t, url, migrations.Consumer).Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	const want = `consumer_name text, partition_key integer, last_processed_id bigint, last_processed_at timestamp with time zone, ` +
		`epoch bigint, anchor_sequence bigint, anchor_message_id text, anchor_stored_at timestamp with time zone, anchor_position text, ` +
		`stream_created_at timestamp with time zone`
	var got, key string
	if err := connect(t, url).QueryRow(t.Context(), `
		SELECT string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position),
			(SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'consumer_offsets'::regclass AND contype = 'p')
		FROM information_schema.columns WHERE table_name = 'consumer_offsets'`).Scan(&got, &key); err != nil || got != want {
		t.Errorf("columns = %s\nwant %s (%v)", got, want, err)
	}
	if key != "PRIMARY KEY (consumer_name, partition_key)" {
		t.Errorf("key = %s", key)
	}
}

// A consumer's database need not know of any outbox.
func TestGroupWithoutOutbox(t *testing.T) {
	cfg, err := pgx.ParseConfig(testenv.SharedPostgres(t).NewDB(t))
	if err != nil {
		t.Fatal(err)
	}
	r := migrations.New(cfg, nil, migrations.Consumer)
	defer r.Close() //nolint:errcheck // the test is over
	done, err := r.Up(t.Context(), migrations.Latest)
	if err != nil || !slices.Equal(appliedNames(done), names(all(migrations.Consumer))) {
		t.Errorf("up = %+v, %v", done, err)
	}
}

// TestMembersOfTheOwner: the owner is a group, and its members migrate. What each of them makes is the group's.
func TestMembersOfTheOwner(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn := connect(t, url)
	of := conn.Config().Database
	exec(t, conn, strings.ReplaceAll(`CREATE ROLE team_{of}; CREATE ROLE one_{of} LOGIN IN ROLE team_{of}; CREATE ROLE two_{of} LOGIN IN ROLE team_{of};
		ALTER SCHEMA public OWNER TO team_{of}`, "{of}", of))
	for i, role := range []string{"one_", "two_"} {
		cfg, err := pgx.ParseConfig(strings.Replace(url, "postgres@", role+of+"@", 1))
		if err != nil {
			t.Fatal(err)
		}
		r := migrations.New(cfg, outboxes(), []migrations.Group{migrations.Relay, migrations.Consumer}[:i+1]...)
		r.Own.Owner = "team_" + of
		defer r.Close() //nolint:errcheck // its statements have ended
		if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
			t.Fatalf("%s: %v", role, err)
		}
	}
	var owners string
	err := conn.QueryRow(t.Context(), `SELECT string_agg(DISTINCT pg_get_userbyid(o), ' ') FROM (
		SELECT relowner AS o FROM pg_class WHERE relnamespace = 'public'::regnamespace
		UNION ALL SELECT proowner FROM pg_proc WHERE pronamespace = 'public'::regnamespace) x`).Scan(&owners)
	if err != nil || owners != "team_"+of {
		t.Errorf("owners %s, %v", owners, err)
	}
}

// TestUntrustedVersionTables: a role that may create objects in the schema makes the table that says which migrations are applied, before
// walpost does, or a view of its name. A superuser neither reads it nor writes to it.
func TestUntrustedVersionTables(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn := connect(t, url)
	of := conn.Config().Database
	exec(t, conn, `CREATE ROLE stranger_`+of+`; GRANT CREATE ON SCHEMA public TO stranger_`+of+`; CREATE SCHEMA lair AUTHORIZATION stranger_`+of+`; SET ROLE stranger_`+of+`;
		CREATE TABLE lair.caught (who text);
		CREATE FUNCTION lair.spy() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN INSERT INTO lair.caught VALUES (current_user); RETURN false; END';
		CREATE FUNCTION lair.trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO lair.caught VALUES (current_user); RETURN NEW; END'; RESET ROLE`)
	const columns = `(version bigint, hash text, applied_at timestamptz DEFAULT now())`
	for name, sql := range map[string]string{
		"a view":  `CREATE VIEW walpost_migrations_relay AS SELECT 1::bigint AS version, ''::text AS hash, now() AS applied_at WHERE lair.spy()`,
		"a table": `CREATE TABLE walpost_migrations_relay ` + columns + `; CREATE TRIGGER spy BEFORE INSERT ON walpost_migrations_relay FOR EACH ROW EXECUTE FUNCTION lair.trigger()`,
	} {
		t.Run(name, func(t *testing.T) {
			exec(t, conn, `SET ROLE stranger_`+of+`; `+sql+`; RESET ROLE`)
			r := newRunner(t, url, outboxes())
			_, status := r.Status(t.Context())
			_, up := r.Up(t.Context(), migrations.Latest)
			for _, err := range []error{status, up} {
				if err == nil || !strings.Contains(err.Error(), `"public"."walpost_migrations_relay" `) || hint.Of(err) == "" {
					t.Errorf("error %v, hint %q", err, hint.Of(err))
				}
			}
			var caught int
			if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM lair.caught`).Scan(&caught); err != nil || caught > 0 {
				t.Errorf("%d calls, %v", caught, err)
			}
			kind, _, _ := strings.Cut(strings.TrimPrefix(sql, "CREATE "), " ")
			exec(t, conn, `DROP `+kind+` walpost_migrations_relay`)
		})
	}
}

// TestOnlyItsOwnIsGiven: while a superuser's migration waits for a name, the owner of the schema makes a function there, which would then
// run as the tables' owner, and renames the schema. The function stays his, and the schema where it is.
func TestOnlyItsOwnIsGiven(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, stranger, other := connect(t, url), connect(t, url), connect(t, url)
	of := conn.Config().Database
	exec(t, conn, strings.ReplaceAll(`CREATE ROLE stranger_{of}; CREATE ROLE owner_{of}; CREATE SCHEMA shop AUTHORIZATION stranger_{of};
		GRANT CREATE ON DATABASE {of} TO stranger_{of}`, "{of}", of))
	exec(t, stranger, `SET ROLE stranger_`+of+`; BEGIN; CREATE TABLE shop.outbox_sent ()`)
	boxes := outboxes()
	for i := range boxes {
		boxes[i].Schema = "shop"
	}
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	r := migrations.New(cfg, boxes, migrations.Relay)
	defer r.Close() //nolint:errcheck // its statements have ended
	r.Own.Schema, r.Owner, r.SetUp = "shop", "owner_"+of, true
	up := make(chan error, 1)
	go func() {
		_, err := r.Up(t.Context(), migrations.Latest)
		up <- err
	}()
	for waits, until := false, time.Now().Add(testenv.Patience); !waits; time.Sleep(10 * time.Millisecond) {
		err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
		if err != nil || time.Now().After(until) {
			t.Fatalf("the migration does not wait: %v", err)
		}
	}
	exec(t, other, `SET ROLE stranger_`+of+`; SET lock_timeout = '200ms'; CREATE FUNCTION shop.his() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN RETURN NEW; END'`)
	if _, err := other.Exec(t.Context(), `ALTER SCHEMA shop RENAME TO away`); pg.Code(err) != pgerrcode.LockNotAvailable {
		t.Errorf("the schema was renamed, or it does not wait: %v", err)
	}
	exec(t, stranger, `ROLLBACK`)
	if err := <-up; err != nil {
		t.Fatal(err)
	}
	var his, sent string
	if err := conn.QueryRow(t.Context(), `SELECT (SELECT pg_get_userbyid(proowner) FROM pg_proc WHERE proname = 'his'),
		(SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass('shop.outbox_sent'))`).Scan(&his, &sent); err != nil {
		t.Fatal(err)
	}
	if his != "stranger_"+of || sent != "owner_"+of {
		t.Errorf("the function belongs to %s, and outbox_sent to %s", his, sent)
	}
}
