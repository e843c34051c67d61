package stream

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
)

// managedServices are recognised by a role that only they have. docs/MANAGED.md has the sources.
var managedServices = []struct{ role, name, section string }{
	{"rds_superuser", "Amazon RDS", "amazon-rds"},
	{"cloudsqlsuperuser", "Google Cloud SQL", "google-cloud-sql"},
	{"alloydbsuperuser", "AlloyDB", "alloydb"},
	{"azure_pg_admin", "Azure Database for PostgreSQL", "azure-database-for-postgresql"},
	{"neon_superuser", "Neon", "neon"},
	{"supabase_admin", "Supabase", "supabase"},
}

// describeManaged names the service that the server seems to belong to. Its roles may have been
// restored on another server, so this is a fact to look at, not one that a check relies on.
func describeManaged(ctx context.Context, conn *pgx.Conn) (f check.Findings, err error) {
	roles := make([]string, len(managedServices))
	for i, s := range managedServices {
		roles[i] = s.role
	}
	var found []string
	var aurora bool
	err = conn.QueryRow(ctx, `SELECT
			ARRAY(SELECT rolname::text FROM pg_roles WHERE rolname = ANY ($1::text[])),
			EXISTS (SELECT FROM pg_proc WHERE proname = 'aurora_stat_logical_wal_cache')`, roles).
		Scan(&found, &aurora)
	if err != nil {
		return nil, fmt.Errorf("look for the roles of managed services: %w", err)
	}
	for _, s := range managedServices {
		if !slices.Contains(found, s.role) {
			continue
		}
		if aurora && s.role == "rds_superuser" {
			s.name, s.section = "Amazon Aurora", "amazon-aurora"
		}
		f.Note("pg-managed", "", "the server seems to be %s, because it has role %q: see docs/MANAGED.md#%s",
			s.name, s.role, s.section)
		break
	}
	return f, nil
}
