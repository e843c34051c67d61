package testenv

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Traps are functions, operators, types and views with the names that pg_catalog's have. They belong to a
// role that has no privilege but CREATE on the schema public. A trap that is called fails, and counts the
// call, whatever becomes of the transaction.
type Traps struct{ admin, url string }

// SetTraps sets them in a database.
func SetTraps(tb testing.TB, url string) *Traps {
	tb.Helper()
	t := &Traps{admin: url, url: withSearchPath(url, "public,pg_catalog")}
	conn, err := pgx.Connect(tb.Context(), url)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // nothing is buffered
	if _, err := conn.Exec(tb.Context(), trapsSQL); err != nil {
		tb.Fatalf("set traps: %v", err)
	}
	t.spring(tb)
	return t
}

// URL leads to the database with a search_path on which every trap comes before what it has its name from.
func (t *Traps) URL() string { return t.url }

// spring shows that the traps work: a statement of every kind meets one.
func (t *Traps) spring(tb testing.TB) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), t.url)
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // nothing is buffered
	for _, sql := range []string{
		`SELECT now()`, `SELECT concat('{}'::pg_catalog.jsonb)`,
		`SELECT num_nulls(pg_catalog.clock_timestamp())`, `SELECT count(*) FROM (VALUES (1)) v`,
		`SELECT unnest(ARRAY[1])`, `SELECT to_regclass('x')`, `SELECT set_config('a.b', 'c', false)`,
		`SELECT hashtextextended('a', 0)`, `SELECT oid FROM pg_class LIMIT 1`,
		`SELECT 1::bigint = 1::bigint`, `SELECT 1 IN (2, 3)`, `SELECT 'a'::pg_catalog.text LIKE 'b'`,
		`SELECT NULLIF(1, 2)`, `SELECT CASE 1 WHEN 2 THEN 3 END`, `SELECT 1 IS DISTINCT FROM 2`,
		`SELECT 1 BETWEEN 2 AND 3`, `SELECT 'a'::text`, `SELECT bool_or(true)`,
		`SELECT 'a'::pg_catalog.varchar || 'b'::pg_catalog.varchar`,
		`SELECT '{}'::pg_catalog.jsonb ->> 'a'`, `SELECT 5::bigint % 2`,
	} {
		if _, err := conn.Exec(tb.Context(), sql); err == nil || !strings.Contains(err.Error(), "trap: ") {
			tb.Fatalf("%s meets no trap: %v", sql, err)
		}
	}
	if err := t.exec(tb.Context(), `SELECT pg_catalog.setval('public.trapped', 1, false)`, nil); err != nil {
		tb.Fatal(err)
	}
}

// Check fails the test where a trap has been called.
func (t *Traps) Check(tb testing.TB) {
	tb.Helper()
	var called bool
	var times int64
	err := t.exec(context.Background(),
		`SELECT is_called, last_value FROM public.trapped`, []any{&called, &times})
	if err != nil {
		tb.Error(err)
	}
	if called {
		tb.Errorf("traps have been called %d times: the server's log has their names", times)
	}
}

func (t *Traps) exec(ctx context.Context, sql string, into []any) error {
	conn, err := pgx.Connect(ctx, t.admin)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) //nolint:errcheck // nothing is buffered
	if into == nil {
		_, err = conn.Exec(ctx, sql)
		return err
	}
	return conn.QueryRow(ctx, sql).Scan(into...)
}

// withSearchPath is the URL of the same database with another search_path.
func withSearchPath(s, path string) string {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	q := u.Query()
	q.Set("search_path", path)
	u.RawQuery = q.Encode()
	return u.String()
}

// trapsSQL copies what pg_catalog has. Beside that come overloads for arguments that pg_catalog's only take
// by a conversion, or as "any": such an overload is found on every search_path. A role that owns neither type
// cannot plant a cast.
const trapsSQL = `
DO $$ BEGIN
	IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'thief') THEN CREATE ROLE thief; END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
GRANT CREATE, USAGE ON SCHEMA public TO thief;
BEGIN;
SET LOCAL ROLE thief;
SET LOCAL search_path = pg_catalog;
SET LOCAL check_function_bodies = off;
CREATE SEQUENCE public.trapped;
GRANT ALL ON SEQUENCE public.trapped TO PUBLIC;
CREATE FUNCTION public.trap(what text) RETURNS boolean LANGUAGE plpgsql AS $t$ BEGIN
	PERFORM pg_catalog.nextval('public.trapped');
	RAISE EXCEPTION 'trap: %, called by %', what, current_user;
END $t$;

DO $do$
DECLARE
	f record;
	types text[] := '{text,varchar,bpchar,name,bigint,integer,smallint,numeric,boolean,jsonb,json,uuid,bytea,
		timestamptz,timestamp,interval,oid,xid8,pg_lsn,"char"}';
	a text;
	b text;
BEGIN
	CREATE TEMP TABLE wanted (kind text, name text, args text, result text, lefttype text, righttype text);
	INSERT INTO wanted SELECT DISTINCT 'function', p.proname,
			pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
		FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace
			AND p.prokind IN ('f', 'w') AND p.prorettype <> 'internal'::regtype
			AND NOT (p.proargtypes::oid[] && ARRAY['internal', 'cstring', '"any"', 'trigger', 'event_trigger',
				'language_handler']::regtype[]::oid[]);
	INSERT INTO wanted SELECT 'aggregate', p.proname, pg_get_function_identity_arguments(p.oid)
		FROM pg_proc p JOIN pg_aggregate a ON a.aggfnoid = p.oid AND a.aggkind = 'n'
		WHERE NOT (p.proargtypes::oid[] && ARRAY['internal', '"any"']::regtype[]::oid[])
			AND p.proallargtypes IS NULL;
	INSERT INTO wanted SELECT 'operator', o.oprname, NULL, format_type(o.oprresult, NULL),
			format_type(nullif(o.oprleft, 0), NULL), format_type(o.oprright, NULL)
		FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprright <> 0;
	FOREACH a IN ARRAY types LOOP
		INSERT INTO wanted SELECT 'function', n, a, r FROM (VALUES
			('concat', 'text'), ('num_nulls', 'integer'), ('num_nonnulls', 'integer'),
			('quote_ident', 'text'), ('quote_literal', 'text'), ('lower', 'text'), ('length', 'integer'),
			('to_regclass', 'regclass'), ('md5', 'text'), ('to_json', 'json'), ('to_jsonb', 'jsonb'),
			('pg_column_size', 'integer'), ('octet_length', 'integer'), ('abs', 'bigint'),
			('trim', 'text')) v(n, r);
		INSERT INTO wanted VALUES ('function', 'hashtextextended', a || ', integer', 'bigint'),
			('function', 'hashtextextended', a || ', bigint', 'bigint'),
			('function', 'format', 'text, ' || a, 'text'),
			('function', 'starts_with', 'text, ' || a, 'boolean');
		INSERT INTO wanted VALUES ('aggregate', 'count', a), ('aggregate', 'max', a);
		INSERT INTO wanted SELECT 'operator', o, NULL, 'boolean', a, a
			FROM unnest('{=,<>,<,<=,>,>=,~~,!~~,~,!~}'::text[]) o;
		INSERT INTO wanted VALUES ('operator', '||', NULL, 'text', a, a),
			('operator', '||', NULL, 'text', 'text', a), ('operator', '||', NULL, 'text', a, 'text');
		FOREACH b IN ARRAY ARRAY['text', 'varchar', 'integer'] LOOP
			INSERT INTO wanted SELECT 'operator', o, NULL, r, a, b FROM (VALUES
				('=', 'boolean'), ('~~', 'boolean'), ('->', 'json'), ('->>', 'text'), ('%', 'bigint'),
				('+', 'bigint'), ('-', 'bigint'), ('*', 'bigint'), ('<<', 'bigint')) v(o, r);
		END LOOP;
	END LOOP;
	INSERT INTO wanted VALUES ('function', 'format', 'text, VARIADIC anycompatiblearray', 'text'),
		('function', 'concat', 'VARIADIC anycompatiblearray', 'text'),
		('function', 'concat', 'anyelement', 'text'), ('function', 'num_nulls', 'anyelement', 'integer');
	INSERT INTO wanted VALUES ('aggregate', 'count', '*'), ('aggregate', 'count', 'anyelement');
	FOR f IN SELECT DISTINCT * FROM wanted LOOP
		BEGIN
			IF f.kind = 'function' THEN
				EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
					f.name, f.args, f.result,
					format('BEGIN PERFORM public.trap(%L); END', f.name || '(' || f.args || ')'));
			ELSIF f.kind = 'aggregate' THEN
				EXECUTE format('CREATE FUNCTION public.%I(text%s) RETURNS text LANGUAGE plpgsql AS %L',
					'trap_' || f.name, CASE f.args WHEN '*' THEN '' WHEN '' THEN '' ELSE ', ' || f.args END,
					format('BEGIN PERFORM public.trap(%L); END', f.name || '(' || f.args || ')'));
				EXECUTE format('CREATE AGGREGATE public.%I(%s) (SFUNC = public.%I, STYPE = text)',
					f.name, coalesce(nullif(f.args, ''), '*'), 'trap_' || f.name);
			ELSE
				EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
					'trap' || f.name, concat_ws(', ', f.lefttype, f.righttype), f.result,
					format('BEGIN PERFORM public.trap(%L); END', f.name));
				EXECUTE format('CREATE OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = public.%I)',
					f.name, 'LEFTARG = ' || f.lefttype || ',', f.righttype, 'trap' || f.name);
			END IF;
		EXCEPTION WHEN OTHERS THEN NULL; -- such as one that a role may not make
		END;
	END LOOP;
	DROP TABLE wanted;
	FOREACH a IN ARRAY types
		|| '{int8,int4,int2,bool,float8,date,regclass,regtype,regnamespace,xid,int2vector}' LOOP
		BEGIN
			EXECUTE format('CREATE DOMAIN public.%I AS %s CHECK (public.trap(%L))', a, a, 'type ' || a);
		EXCEPTION WHEN OTHERS THEN NULL;
		END;
	END LOOP;
	FOR a IN SELECT relname FROM pg_class
		WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
			AND relname NOT IN ('pg_statistic', 'pg_authid') LOOP
		BEGIN
			EXECUTE format('CREATE VIEW public.%I AS SELECT * FROM pg_catalog.%1$I WHERE public.trap(%L)',
				a, 'view ' || a);
			EXECUTE format('GRANT SELECT ON public.%I TO PUBLIC', a);
		EXCEPTION WHEN OTHERS THEN NULL;
		END;
	END LOOP;
END $do$;
COMMIT`
