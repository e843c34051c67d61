package setup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
)

// HasRole reports whether the relay's role exists, and whether its password is known.
func (s *Setup) HasRole() (exists, known bool, err error) {
	known, err = s.hasPassword()
	return s.facts.RoleExists, known || s.cfg.NewPassword, err
}

// SlotOf is the database of a slot, "" where there is none of that name.
func (s *Setup) SlotOf(ctx context.Context, slot string) (database string, err error) {
	err = s.conn.QueryRow(ctx, `SELECT coalesce(database::text, 'none, as it is physical')
		FROM pg_replication_slots WHERE slot_name::text = $1`, slot).Scan(&database)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("look for slot %s: %w", slot, err)
	}
	return database, nil
}

// SystemID is the server's system identifier, "" where the role may not read it.
func (s *Setup) SystemID(ctx context.Context) (id string, err error) {
	err = s.conn.QueryRow(ctx, `SELECT system_identifier::text FROM pg_control_system()`).Scan(&id)
	if err != nil && pg.Code(err) != pgerrcode.InsufficientPrivilege {
		return "", fmt.Errorf("read the system identifier: %w", err)
	}
	return id, nil
}
