package bench

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// TestConnectionStrings: every kind of connection string leads into the benchmark's own
// database, and no password to where other users of the machine see it.
func TestConnectionStrings(t *testing.T) {
	for _, conn := range []string{
		"postgres://relay:s3cret@127.0.0.1:5432/orders?sslmode=disable",
		"postgresql://relay@127.0.0.1/orders?sslmode=disable&password=s3cret&dbname=orders",
		"host=127.0.0.1 user=relay password=s3cret dbname=orders sslmode=disable",
		"host=127.0.0.1 user=relay password = 's3cr\\'e t s3cret' dbname=orders",
	} {
		in, err := inDatabase(conn, Database)
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := pgx.ParseConfig(in)
		if err != nil || cfg.Database != Database || cfg.User != "relay" || !strings.Contains(cfg.Password, "s3cr") {
			t.Errorf("%s: %v, database %q, user %q", in, err, cfg.Database, cfg.User)
		}
		seen := withoutPassword(in)
		cfg, err = pgx.ParseConfig(seen)
		if err != nil || strings.Contains(seen, "s3cr") || cfg.Database != Database || cfg.User != "relay" || cfg.Host != "127.0.0.1" {
			t.Errorf("%s: seen as %s: %v", in, seen, err)
		}
	}
	if in, err := inDatabase("", Database); err != nil || in != "dbname="+Database {
		t.Errorf("nothing configured: %q, %v", in, err)
	}
}
