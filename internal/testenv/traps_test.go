package testenv_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestTraps: each kind of statement that names something of pg_catalog's meets one.
func TestTraps(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		testenv.SetTraps(t, pg.NewDB(t)).Check(t)
	})
}
