package migrations_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
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

// versions are those of a group.
func versions(g migrations.Group) (all []int64) {
	for _, m := range migrations.All() {
		if m.Group == g {
			all = append(all, m.Version)
		}
	}
	return all
}

func appliedVersions(done []migrations.Applied) (all []int64) {
	for _, d := range done {
		all = append(all, d.Version)
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
			if err != nil || !slices.Equal(appliedVersions(done), versions(g)) {
				t.Fatalf("up of %s = %+v, %v", g, done, err)
			}
			before = append(before, catalog(t, conn))
		}
		if got := before[len(order)]; got != want {
			t.Errorf("the groups make\n%s\nup makes\n%s", got, want)
		}
		for i, g := range slices.Backward(order) {
			done, err := newGroupRunner(t, url, g).Down(t.Context(), 0)
			want := versions(g)
			slices.Reverse(want)
			if err != nil || !slices.Equal(appliedVersions(done), want) {
				t.Fatalf("down of %s = %+v, %v", g, done, err)
			}
			if got := catalog(t, conn); got != before[i] {
				t.Errorf("down of %s leaves\n%s\nwant\n%s", g, got, before[i])
			}
		}
	}
}

// Down goes by versions, not by the order in which they were applied.
func TestDownAfterGroups(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	for _, g := range []migrations.Group{migrations.Consumer, migrations.Relay, migrations.Idempotency} {
		if _, err := newGroupRunner(t, url, g).Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
	}
	r := newRunner(t, url, outboxes())
	last := migrations.All()[len(migrations.All())-1].Version
	done, err := r.Down(t.Context(), migrations.OneStep)
	if err != nil || !slices.Equal(appliedVersions(done), []int64{last}) {
		t.Fatalf("down = %+v, %v", done, err)
	}
	done, err = r.Down(t.Context(), 3)
	if err != nil || len(done) != len(migrations.All())-4 {
		t.Fatalf("down to 3 = %+v, %v", done, err)
	}
}

func TestStatusOfGroups(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	r := newRunner(t, url, outboxes())
	status := func(r *migrations.Runner) (out string) {
		states, err := r.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range states {
			switch {
			case !s.AppliedAt.IsZero():
				out += "a"
			case s.OtherGroup:
				out += "o"
			default:
				out += "p"
			}
		}
		return out
	}
	all := len(migrations.All())
	if got := status(r); got != strings.Repeat("p", all) {
		t.Errorf("before anything: %s", got)
	}
	consumer := newGroupRunner(t, url, migrations.Consumer)
	if _, err := consumer.Up(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	if got := status(r); !strings.HasPrefix(got, "oooaop") {
		t.Errorf("with the first of the consumer's: %s", got)
	}
	if got := status(consumer); !strings.HasPrefix(got, "ap") || len(got) != len(versions(migrations.Consumer)) {
		t.Errorf("of the consumer: %s", got)
	}
	if _, err := consumer.Down(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if got := status(r); got != strings.Repeat("p", all) {
		t.Errorf("after everything: %s", got)
	}
}

// The version must be one of the group: another one would mean something else than it says.
func TestVersionOfAnotherGroup(t *testing.T) {
	r := newGroupRunner(t, testenv.SharedPostgres(t).NewDB(t), migrations.Consumer)
	_, up := r.Up(t.Context(), 3)
	_, down := r.Down(t.Context(), 3)
	printed := migrations.Print(&bytes.Buffer{}, 3, outboxes(), migrations.Consumer)
	for _, err := range []error{up, down, printed} {
		if !errors.Is(err, migrations.ErrNoVersion) || !strings.Contains(err.Error(), "in group consumer") || hint.Of(err) == "" {
			t.Errorf("error = %v, hint %q", err, hint.Of(err))
		}
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
	_, err = newGroupRunner(t, pg.URLFor("tables_user", cfg.Database), migrations.Consumer).Up(t.Context(), migrations.Latest)
	if err == nil || !strings.Contains(err.Error(), `belongs to role "tables_owner"`) || !strings.Contains(hint.Of(err), `a URL of role "tables_owner"`) {
		t.Errorf("error %v, hint %q", err, hint.Of(err))
	}
}

// Each group's SQL makes what its up makes.
func TestPrintOfGroups(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	for _, g := range migrations.Groups() {
		var sql bytes.Buffer
		if err := migrations.Print(&sql, migrations.Latest, outboxes(), g); err != nil {
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

func TestConsumerOffsetsAreNotDroppedWithRows(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, r := connect(t, url), newGroupRunner(t, url, migrations.Consumer)
	if _, err := r.Up(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, `INSERT INTO consumer_offsets (consumer, stream) VALUES ('mailer', 'EVENTS')`)
	before := catalog(t, conn)
	done, err := r.Up(t.Context(), migrations.Latest)
	if err == nil || len(done) > 0 || !strings.Contains(err.Error(), "consumer_offsets holds rows") || hint.Of(err) == "" {
		t.Errorf("up = %+v, %v, hint %q", done, err, hint.Of(err))
	}
	var kept string
	if err := conn.QueryRow(t.Context(), `SELECT consumer FROM consumer_offsets`).Scan(&kept); err != nil || kept != "mailer" {
		t.Errorf("kept %q, %v", kept, err)
	}
	if got := catalog(t, conn); got != before {
		t.Errorf("up changed the schema to\n%s", got)
	}
	exec(t, conn, `TRUNCATE consumer_offsets`)
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, `INSERT INTO consumer_definitions (consumer_name, stream, partitions, start_at, start_sequence)
		VALUES ('mailer', 'EVENTS', 4, 'new', 17)`)
	if done, err := r.Down(t.Context(), 4); err == nil || len(done) > 0 || !strings.Contains(hint.Of(err), "TRUNCATE") {
		t.Errorf("down = %+v, %v, hint %q", done, err, hint.Of(err))
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
	if err != nil || !slices.Equal(appliedVersions(done), versions(migrations.Consumer)) {
		t.Errorf("up = %+v, %v", done, err)
	}
}
