// Package badinput starts the relay's own program with what goes wrong at a
// first start, and holds it to four things: it ends by itself and soon, or waits
// where the server may only be away, its exit
// code says whose error it is, standard error says in one line what is wrong and
// in another what to do, and neither server has changed.
package badinput

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
