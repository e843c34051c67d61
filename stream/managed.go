package stream

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
)

// Managed is a service that manages PostgreSQL. docs/MANAGED.md has the sources.
type Managed struct {
	Name    string
	Section string // of docs/MANAGED.md
	// SwitchOn says what has wal_level = logical, instead of ALTER SYSTEM.
	SwitchOn string
	// Role is one whose members may replicate without REPLICATION, or "".
	Role string

	sign string // a role that only this service has
}

// managedServices are in the order in which their signs are looked for.
var managedServices = []Managed{
	{
		sign: "rds_superuser", Name: "Amazon RDS", Section: "amazon-rds", Role: "rds_replication",
		SwitchOn: "in the parameter group: rds.logical_replication = 1, and reboot the instance",
	},
	{
		sign: "cloudsqlsuperuser", Name: "Google Cloud SQL", Section: "google-cloud-sql",
		SwitchOn: "among the instance's flags: cloudsql.logical_decoding = on, and restart it",
	},
	{
		sign: "alloydbsuperuser", Name: "AlloyDB", Section: "alloydb",
		SwitchOn: "among the instance's flags: alloydb.logical_decoding = on, which restarts it",
	},
	{
		sign: "azure_pg_admin", Name: "Azure Database for PostgreSQL",
		Section:  "azure-database-for-postgresql",
		SwitchOn: "among the server's parameters: wal_level = logical, and restart it",
	},
	{
		sign: "neon_superuser", Name: "Neon", Section: "neon",
		SwitchOn: "in the project's settings: logical replication, which restarts its computes",
	},
	{
		sign: "supabase_admin", Name: "Supabase", Section: "supabase",
		SwitchOn: "it is on by default: ask the service why wal_level is not logical",
	},
}

// ReadManaged tells which service the server seems to belong to, nil for none. Its roles may have been
// restored on another server, so this is a fact to look at, not one that a check relies on.
func ReadManaged(ctx context.Context, conn *pgx.Conn) (*Managed, error) {
	signs := make([]string, len(managedServices))
	for i, s := range managedServices {
		signs[i] = s.sign
	}
	var found []string
	var aurora bool
	err := conn.QueryRow(ctx, `SELECT
			ARRAY(SELECT rolname::text FROM pg_roles WHERE rolname = ANY ($1::text[])),
			EXISTS (SELECT FROM pg_proc WHERE proname = 'aurora_stat_logical_wal_cache')`, signs).
		Scan(&found, &aurora)
	if err != nil {
		return nil, fmt.Errorf("look for the roles of managed services: %w", err)
	}
	for _, s := range managedServices {
		if !slices.Contains(found, s.sign) {
			continue
		}
		if aurora && s.sign == "rds_superuser" {
			s.Name, s.Section = "Amazon Aurora", "amazon-aurora"
			s.SwitchOn = "in a cluster parameter group: rds.logical_replication = 1, and reboot the writer"
		}
		return &s, nil
	}
	return nil, nil
}

// describeManaged names the service.
func describeManaged(ctx context.Context, conn *pgx.Conn) (f check.Findings, err error) {
	s, err := ReadManaged(ctx, conn)
	if err == nil && s != nil {
		f.Note("pg-managed", "", "the server seems to be %s, because it has role %q: see docs/MANAGED.md#%s",
			s.Name, s.sign, s.Section)
	}
	return f, err
}
