package table

import (
	"context"
	"fmt"
	"strconv"

	"github.com/walpost/walpost/outbox"
)

// Whole calls see with the values of each row that the table shows, and its place among rows. They are valid
// until it returns. It may be called again for a row. A payload that is longer than mostPayload, in bytes, is
// left out. A row is passed over where the server cannot render what it holds by now.
func (db *DB) Whole(
	ctx context.Context, t *outbox.Table, rows []Row, mostPayload int, see func(n int, ev *outbox.Event),
) error {
	fields := eventFieldsOf(t)
	sql := wholeSQL(t, fields, mostPayload)
	all := make([]int, len(rows))
	for i := range all {
		all[i] = i
	}
	err := portions[int]{
		size: &db.portion, bytes: func(i int) int { return rows[i].Bytes },
		do: func(these []int) error {
			ids, hashes := make([]string, len(these)), make([]int64, len(these))
			for i, n := range these {
				ids[i], hashes[i] = rows[n].Ref.ID, int64(rows[n].Ref.Hash)
			}
			return db.QueryText(ctx, sql, []any{ids, hashes}, func(v [][]byte) error {
				ord, err := strconv.Atoi(string(v[len(v)-1]))
				if err == nil {
					ev := eventOf(t, fields, v)
					see(these[ord-1], &ev)
				}
				return err
			})
		},
		alone: func(int, error) error { return nil },
	}.run(all)
	if err != nil {
		return fmt.Errorf("read rows of %s: %w", t, err)
	}
	return nil
}

func wholeSQL(t *outbox.Table, fields []outbox.Field, mostPayload int) string {
	columns, lengths := valuesSQL(t, fields, mostPayload, lengthSQL)
	return fmt.Sprintf(`SELECT %s, w.ord
		FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS w(id, hash, ord)
		JOIN %s ON %s = w.hash, LATERAL (SELECT %s OFFSET 0) n`,
		columns, byIDSQL(t, t.SQL(), ""), t.HashSQL("t"), lengths)
}
