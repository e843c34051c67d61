package e2e

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// TestEveryCommittedRowOnceInOrder: many writers, small and large transactions,
// rollbacks of the whole and of savepoints, asynchronous commits.
func TestEveryCommittedRowOnceInOrder(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		w := r.newWitness()
		p := r.start()
		r.awaitStreaming()
		r.write(sized(t, pg, 100_000, 20_000))
		r.awaitSettled()
		p.stop()
		r.audit()
		w.compare()
	})
}

// sized is the full size on the default version, and the small one on others.
func sized[T any](t *testing.T, pg *testenv.Postgres, full, small T) T {
	t.Helper()
	standard, err := pgbin.Find()
	if err != nil {
		t.Fatal(err)
	}
	if !testenv.Full(t) || pg.Binaries().Version != standard.Version {
		return small
	}
	return full
}
