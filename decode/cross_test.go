package decode_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestHashText compares the hash with the server's own.
func TestHashText(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		conn := connect(t, pg.NewDB(t))
		r := rand.New(rand.NewPCG(1, 2))
		texts, seeds := randomTexts(r, 3000), make([]int64, 3000)
		for i := range seeds {
			if i%4 != 0 { // seed 0 goes another way
				seeds[i] = int64(r.Uint64())
			}
		}
		rows, err := conn.Query(t.Context(),
			`SELECT hashtextextended(x COLLATE "C", s) FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS u(x, s, n) ORDER BY n`, texts, seeds)
		check(t, err)
		want, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		check(t, err)
		for i, x := range texts {
			if got := int64(outbox.HashText([]byte(x), uint64(seeds[i]))); got != want[i] {
				t.Fatalf("HashText(%q, %d) is %d, the server's %d", x, seeds[i], got, want[i])
			}
		}
	})
}

// randomTexts are what a text column can hold: everything but a zero byte.
func randomTexts(r *rand.Rand, n int) []string {
	alphabets := [][]rune{
		[]rune("abcdefghijklmnopqrstuvwxyz 0123456789"), []rune("\x01\x02\t\n\v\f\r\x1b\x1f\x7f"), []rune(`'"\{}[],;%$/()NULL`),
		[]rune("äßéñ日本語漢字🐘\u200b\u202e\ufeff\u0301\U0010ffff"),
	}
	texts := make([]string, n)
	for i := range texts {
		length := r.IntN(40)
		if i%50 == 0 {
			length = r.IntN(3000)
		}
		var b strings.Builder
		for range length {
			a := alphabets[(i+r.IntN(2))%len(alphabets)]
			b.WriteRune(a[r.IntN(len(a))])
		}
		texts[i] = b.String()
	}
	return texts
}

// randomFloats have few digits, or any bits, or are ten's powers and halves,
// where shortest renderings differ.
func randomFloats(r *rand.Rand, n int) (float8, float4 []string) {
	for i := range n {
		f := math.Float64frombits(r.Uint64())
		g := math.Float32frombits(r.Uint32())
		switch i % 4 {
		case 0:
			f = float64(r.IntN(2000)-1000) * math.Pow(10, float64(r.IntN(40)-20))
			g = float32(f)
		case 1:
			f = math.Ldexp(float64(1<<53+r.Int64N(1<<53)), r.IntN(10)-2)
			g = math.Float32frombits(uint32(150+r.IntN(10))<<23 | r.Uint32()&(1<<23-1))
		}
		float8 = append(float8, strconv.FormatFloat(f, 'g', -1, 64))
		float4 = append(float4, strconv.FormatFloat(float64(g), 'g', -1, 32))
	}
	return float8, float4
}

// crossTypes are column types and an expression for their value, over the
// columns s, f8 and f4 of the random seeds and the row's number g.
var crossTypes = [][2]string{
	{"text", "s"},
	{"varchar(300)", "left(s, 300)"},
	{"char(9)", "left(s, 9)"},
	{"name", "left(s, 12)::name"},
	{"jsonb", "jsonb_build_object(s, f8, 'list', ARRAY[s, NULL], 'n', g::numeric / 8)"},
	{"json", `('{"k":   ' || to_json(s) || ', "k": ' || g || '}')::json`},
	{"bool", "g % 2 = 0"},
	{"float8", "f8"},
	{"float4", "f4"},

	{"smallint", "g * 37 % 65536 - 32768"},
	{"int", "hashtext(s)"},
	{"bigint", "hashtextextended(s, g)"},
	{"uuid", "md5(s)::uuid"},
	{"bytea", "convert_to(s, 'UTF8')"},
	{"oid", "(hashtextextended(s, g) & 4294967295)::oid"},
	{"date", "'2000-01-01'::date + hashtext(s) / 3000"},
	{"timestamptz", "moment"},
	{"timestamp", "moment AT TIME ZONE 'Asia/Kathmandu'"},

	{"numeric", "(hashtextextended(s, g)::numeric * 10::numeric ^ (g % 60 - 30))"},
	{"numeric(30,6)", "CASE WHEN g % 50 = 7 THEN 'NaN' ELSE hashtextextended(s, g)::numeric / 7 END"},
	{"text[]", "ARRAY[s, NULL, '', 'NULL', left(s, 3)]"},
	{"timestamptz[]", "ARRAY[moment, NULL]"},
	{"inet", "('10.1.2.3'::inet + g) "},
	{"cidr", "set_masklen(('2001:db8::'::cidr + g)::cidr, 64)"},
	{"macaddr", "trunc('08:00:2b:01:02:03'::macaddr)"},
	{"interval", "(hashtextextended(s, g) / 1000000) * interval '1 microsecond' - g * interval '1 month'"},
	{"time", "moment::time"},

	{"timetz", "moment::timetz"},
	{"timestamptz(2)", "moment"},
	{"tstzrange", "tstzrange(moment, NULL)"},
	{"int4range", "int4range(g, g + 5)"},
	{"point", "point(f4::float8, g)"},
	{"money", "(g * 1.37)::numeric::money"},
	{"bit(7)", "g::bit(7)"},
	{"varbit", "g::bit(20)::varbit"},
	{"tsvector", "to_tsvector('simple', left(s, 200))"},

	{"cross_mood", "CASE g % 2 WHEN 0 THEN 'calm' ELSE 'it''s, \"cross\"' END::cross_mood"},
	{"cross_positive", "g + 1"},
	{"cross_pair", "CASE WHEN g % 5 = 0 THEN ROW(NULL, NULL)::cross_pair ELSE ROW(g, s)::cross_pair END"},
	{`"char"`, `chr(1 + g % 127)::"char"`},
	{"pg_lsn", "'0/0'::pg_lsn + g::numeric * 1e10::numeric"},
	{"jsonb[]", "ARRAY[to_jsonb(s), NULL]"},
	{"xid8", "g::text::xid8"},
	{"tid", "format('(%s,%s)', g, g % 9)::tid"},
	{"bytea[]", "ARRAY[convert_to(s, 'UTF8')]"},
}

const crossRows = 400

// TestCross sends random rows of many types through the WAL and compares every
// value and the hash with what SQL says of the table's rows.
func TestCross(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		conn := connect(t, url)
		seed(t, conn)
		types := slices.Clone(crossTypes)
		if _, err := conn.Exec(t.Context(), "SELECT '<a/>'::xml"); err == nil {
			types = append(types, [2]string{"xml", "format('<?xml version=\"1.0\"?><a>%s</a>', g)::xml"})
		}
		fields := []outbox.Field{
			outbox.TenantID, outbox.AggregateType, outbox.AggregateID, outbox.AggregateVersion, outbox.EventType,
			outbox.EventVersion, outbox.Payload, outbox.OccurredAt, outbox.TraceID,
		}
		n := 0
		for columns := range slices.Chunk(types, len(fields)) {
			n++
			cross(t, conn, url, fmt.Sprintf("cross_%d", n), columns, fields)
		}
		if n < 5 {
			t.Errorf("%d tables were compared", n)
		}
	})
}

func seed(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	exec(t, conn, `CREATE TYPE cross_mood AS ENUM ('calm', 'it''s, "cross"');
		CREATE DOMAIN cross_positive AS int CHECK (VALUE > 0);
		CREATE TYPE cross_pair AS (a int, b text);
		CREATE TABLE seeds (g int, s text, f8 float8, f4 float4, moment timestamptz)`)
	r := rand.New(rand.NewPCG(3, 4))
	f8, f4 := randomFloats(r, crossRows)
	_, err := conn.Exec(t.Context(), `INSERT INTO seeds SELECT g, s, f8::float8, f4::float4,
			date_trunc((ARRAY['second', 'milliseconds', 'microseconds'])[g % 3 + 1],
				'2026-11-20'::timestamptz + (hashtextextended(s, g) / 1000) * interval '1 microsecond')
		FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS u(s, f8, f4, g)`, randomTexts(r, crossRows), f8, f4)
	check(t, err)
}

func cross(t *testing.T, conn *pgx.Conn, url, name string, types [][2]string, fields []outbox.Field) {
	t.Helper()
	layout := outbox.Layout{Name: "cross"}
	layout.Columns[outbox.ID] = "id"
	columns, values, texts := []string{"id bigint"}, []string{"g"}, []string{}
	for i, typ := range types {
		c := fmt.Sprintf("c%d", i)
		layout.Columns[fields[i]] = c
		columns = append(columns, c+" "+typ[0])
		values = append(values, fmt.Sprintf("CASE WHEN (g + %d) %% 7 > 0 THEN %s END", i, typ[1]))
		texts = append(texts, fmt.Sprintf("CASE WHEN %s IS DISTINCT FROM NULL THEN concat(%[1]s) END", c))
	}
	table := &outbox.Table{Schema: "public", Name: name, Layout: layout}
	exec(t, conn, fmt.Sprintf("CREATE TABLE %s (%s)", name, strings.Join(columns, ", ")))
	exec(t, conn, fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %[1]s WITH (publish = 'insert')", name))
	exec(t, conn, fmt.Sprintf("SELECT pg_create_logical_replication_slot('%s', 'pgoutput')", name))
	exec(t, conn, fmt.Sprintf("INSERT INTO %s SELECT %s FROM seeds", name, strings.Join(values, ", ")))

	want := make(map[string]crossRow)
	rows, err := conn.Query(t.Context(), fmt.Sprintf("SELECT id::text, %s, ARRAY[%s] FROM %s t", table.HashSQL("t"), strings.Join(texts, ", "), name))
	check(t, err)
	var id string
	var row crossRow
	_, err = pgx.ForEachRow(rows, []any{&id, &row.hash, &row.values}, func() error {
		want[id] = crossRow{hash: row.hash, values: slices.Clone(row.values)}
		return nil
	})
	check(t, err)
	if len(want) != crossRows {
		t.Fatalf("%s has %d rows", name, len(want))
	}
	compare(t, table, fields, want, receive(t, url, name, name))
}

// crossRow is a row as SQL renders it.
type crossRow struct {
	hash   int64
	values []*string
}

func compare(t *testing.T, table *outbox.Table, fields []outbox.Field, want map[string]crossRow, messages [][]byte) {
	t.Helper()
	d := decode.New([]*outbox.Table{table}, nil)
	for _, data := range messages {
		m := feed(t, d, data)
		if m.Kind != decode.Row {
			continue
		}
		id := string(m.Event.Values[outbox.ID])
		row, ok := want[id]
		if !ok {
			t.Fatalf("%s: row %s is not in the table, or came twice", table, id)
		}
		delete(want, id)
		for i, v := range row.values {
			got := m.Event.Values[fields[i]]
			if (v == nil) != (got == nil) || v != nil && *v != string(got) {
				t.Errorf("%s: row %s, column %d is %q, in SQL %q", table, id, i, got, str(v))
			}
		}
		if got := int64(m.Event.Hash()); got != row.hash {
			t.Errorf("%s: row %s has hash %d, in SQL %d", table, id, got, row.hash)
		}
		if t.Failed() {
			return
		}
	}
	if len(want) != 0 {
		t.Errorf("%s: %d rows did not come", table, len(want))
	}
}

func str(s *string) string {
	if s == nil {
		return "NULL"
	}
	return *s
}
