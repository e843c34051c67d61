package table

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

// TestArrayIsReadAsItWasWritten: the server takes an array apart as it was put together,
// whatever is in it.
func TestArrayIsReadAsItWasWritten(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), testenv.SharedPostgres(t).NewDB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	want := []string{
		"1", "-17", "", "NULL", "null", "a", "cafe", `"`, `\`, `\"`, "{1,2}", ",", " ", " x ", "line\nbreak\ttab", "ä€😀", "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
		"1e5", "0x1f", "'", "--", "g",
	}
	var a, numbers, none array
	a.null()
	a.null()
	for _, s := range want {
		a.string(s)
	}
	a.null()
	numbers.int(-1 << 63)
	numbers.int(1<<63 - 1)
	none.null()
	var got []string
	var last bool
	var ints []int64
	var nothing *[]string
	err = conn.QueryRow(t.Context(), `SELECT ($1::text[])[3:cardinality($1::text[]) - 1], num_nulls(($1::text[])[1], ($1::text[])[2], ($1::text[])[cardinality($1::text[])]) = 3, $2::bigint[], $3::text[]`,
		a.value(), numbers.value(), none.value()).Scan(&got, &last, &ints, &nothing)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) || !last || nothing != nil || !slices.Equal(ints, []int64{-1 << 63, 1<<63 - 1}) {
		t.Errorf("got %q, %v, %v, %v", got, last, ints, nothing)
	}
}
