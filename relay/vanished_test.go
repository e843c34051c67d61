package relay_test

import (
	"fmt"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

const vanishes = "rows vanish before they are marked: such a row is lost where a start, a new slot or poll mode asks the table for it"

// TestRowsVanishBeforeTheyAreMarked: a producer that inserts and deletes in one transaction wants mark
// none. Its events are delivered while a relay streams, and only then: that is said once, and not of rows
// that are gone after their marks.
func TestRowsVanishBeforeTheyAreMarked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)
	r.exec(`DELETE FROM outbox_messages`) // as retention does
	r.put(6, 10)
	r.pending(0)
	r.passes(r.here())
	if n := x.logged(vanishes).Len(); n != 0 {
		t.Errorf("it was said of rows that are marked, %d times", n)
	}
	for n := 11; n <= 13; n++ {
		r.exec(fmt.Sprintf(`BEGIN; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', 1, 'order.placed', '{"n": %d}'); DELETE FROM outbox_messages WHERE processed_at IS NULL; COMMIT`, n))
	}
	r.passes(r.here())
	r.storedIs(1, 13)
	if n := x.logged(vanishes).Len(); n != 1 {
		t.Errorf("it was said %d times, want once", n)
	}
}
