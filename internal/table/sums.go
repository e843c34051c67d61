package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// PayloadSums are the SHA-256 sums of the rows' payloads, as text and without white space
// (blank, tab, LF, CR) around it. One is nil where the table does not show that very row, as where
// the server cannot render what it holds by now.
func (db *DB) PayloadSums(ctx context.Context, t *outbox.Table, rows []Row) ([][]byte, error) {
	sums := make([][]byte, len(rows))
	sql := payloadSumsSQL(t)
	all := make([]int, len(rows))
	for i := range all {
		all[i] = i
	}
	err := portions[int]{
		size: &db.portion, bytes: func(i int) int { return rows[i].Bytes },
		do: func(these []int) error {
			some := make([]Row, len(these))
			for i, n := range these {
				some[i] = rows[n]
			}
			return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				a := db.args(some)
				result, _ := conn.Query(ctx, sql, a.ids.value(), a.hashes.value())
				var ord int
				var sum []byte
				_, err := pgx.ForEachRow(result, []any{&ord, &sum}, func() error {
					sums[these[ord-1]] = append([]byte(nil), sum...)
					return nil
				})
				return err
			})
		},
		alone: func(int, error) error { return nil },
	}.run(all)
	if err != nil {
		return nil, fmt.Errorf("compare payloads of %s: %w", t, err)
	}
	return sums, nil
}

func payloadSumsSQL(t *outbox.Table) string {
	payload := "''"
	if t.Layout.Has(outbox.Payload) {
		payload = "concat(t." + t.Column(outbox.Payload) + ")"
	}
	// SQL_ASCII is every encoding's bytes as they are.
	return strings.NewReplacer(
		"{byid}", byIDSQL(t, t.SQL(), ""), "{hash}", t.HashSQL("t"), "{payload}", payload,
	).Replace(`
SELECT w.ord::int, sha256(convert_to(btrim({payload}, ' ' || chr(9) || chr(10) || chr(13)), 'SQL_ASCII'))
FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS w(id, hash, ord)
JOIN {byid} ON {hash} = w.hash`)
}
