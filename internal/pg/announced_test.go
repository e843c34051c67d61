package pg_test

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walpost/walpost/internal/pg"
)

// TestAnnouncedLength: a server that announces a message of 100 MB is not waited for.
func TestAnnouncedLength(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // of a test
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte{'R', 6, 0, 0, 0})
			context.AfterFunc(t.Context(), func() { _ = c.Close() })
		}
	}()
	cfg := pg.Config{URL: "postgres://walpost@" + l.Addr().String() + "/shop?sslmode=disable&connect_timeout=600"}
	_, err = pg.Connect(t.Context(), cfg)
	_, raw := pg.ConnectRaw(t.Context(), cfg)
	for _, err := range []error{err, raw} {
		if long := (*pgproto3.ExceededMaxBodyLenErr)(nil); !errors.As(err, &long) {
			t.Errorf("connected: %v", err)
		}
	}
}
