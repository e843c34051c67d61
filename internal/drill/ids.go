package drill

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// try finds out which ids the table takes, in a transaction that is rolled back.
func (l *load) try(ctx context.Context, t *outbox.Table) error {
	conn, err := l.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // what it wrote was rolled back
	base := time.Now().Unix() * 10
	var first error
	ids := []func(int) any{func(int) any { return nil }, uuids(time.Now())}
	if !table.Counts(t.IDType) { // random ones would not tell which event of a statement came first
		slices.Reverse(ids)
	}
	for _, id := range ids {
		for _, of := range []func(int) any{
			func(n int) any { return base + int64(numberOf(n)) },
			func(n int) any { return fmt.Sprintf("00000000-0000-4000-8000-%012d", base+int64(numberOf(n))) },
			func(n int) any { return 1 + numberOf(n) },
		} {
			l.id, l.of = id, of
			err := l.rolledBack(ctx, conn)
			if err == nil {
				return nil
			}
			if first == nil {
				first = err
			}
			if conn.IsClosed() {
				return first
			}
		}
	}
	advice := ownTraffic
	if pg.Code(first) == pgerrcode.InsufficientPrivilege {
		advice = fmt.Sprintf("as the table's owner, GRANT that to %s; %s",
			outbox.QuoteIdent(conn.Config().User), advice)
	}
	return hint.Wrap(fmt.Errorf("write the drill's events into %s: %w", t, first), advice)
}

func (l *load) rolledBack(ctx context.Context, conn *pgx.Conn) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it is all that is meant
	_, err = l.inserter.Insert(ctx, tx, l.message(1))
	return err
}

// uuids are of version 7, and rise with the events.
func uuids(begin time.Time) func(n int) any {
	return func(n int) any {
		var b [16]byte
		_, _ = rand.Read(b[6:])
		at := binary.BigEndian.AppendUint64(nil, uint64(begin.UnixMilli()+int64(n)))
		copy(b[:6], at[2:])
		b[6], b[8] = b[6]&0x0f|0x70, b[8]&0x3f|0x80
		return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	}
}

// numberOf is the number of an event's aggregate. Some events in a row are of the same one.
func numberOf(n int) int { return n / 4 % aggregates }
