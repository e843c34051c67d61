// Package e2e runs the relay's own program between a real PostgreSQL and a real
// nats-server, each of them a process that can be killed, and holds the stream
// against the table afterwards.
package e2e

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
