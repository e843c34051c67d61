package testenv

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Standby makes and starts a hot standby of the server, which goes on running.
// It streams through a physical slot called name, which is also its
// application_name, with hot_standby_feedback on. Settings win over the
// primary's and over these.
func (p *Postgres) Standby(ctx context.Context, name string, settings map[string]string) (*Postgres, error) {
	s, err := newPostgres(ctx, p.bin.Dir)
	if err != nil {
		return nil, err
	}
	s.settings = p.standbySettings(s, name)
	maps.Copy(s.settings, settings)
	if err := p.seed(ctx, s, name); err != nil {
		return nil, errors.Join(fmt.Errorf("make standby: %w", err), s.Close())
	}
	if err := s.Start(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (p *Postgres) standbySettings(s *Postgres, name string) map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	settings := maps.Clone(p.settings)
	settings["port"] = fmt.Sprint(s.port)
	settings["unix_socket_directories"] = s.socketDir()
	// dbname is for slot synchronization (PostgreSQL 17).
	settings["primary_conninfo"] = fmt.Sprintf(
		"host=127.0.0.1 port=%d user=%s dbname=postgres application_name=%s", p.port, superuser, name)
	settings["primary_slot_name"] = name
	settings["hot_standby_feedback"] = "on"
	return settings
}

// seed copies the running server's files into s between the two calls of the
// low-level backup API: pg_basebackup is not part of every build.
func (p *Postgres) seed(ctx context.Context, s *Postgres, slot string) error {
	start, stop := "pg_backup_start($1, true)", "pg_backup_stop(false)"
	if p.bin.Major < 15 {
		start, stop = "pg_start_backup($1, true, false)", "pg_stop_backup(false, false)"
	}
	return p.withConn(ctx, "postgres", func(conn *pgx.Conn) error {
		// The slot comes first: it keeps the WAL that the standby begins with.
		const createSlot = "SELECT pg_create_physical_replication_slot($1, true)"
		if _, err := conn.Exec(ctx, createSlot, slot); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "SELECT "+start, slot); err != nil {
			return err
		}
		if err := copyTree(s.Dir(), p.Dir(), s.who, notInBackup); err != nil {
			return err
		}
		var label string
		if err := conn.QueryRow(ctx, "SELECT labelfile FROM "+stop).Scan(&label); err != nil {
			return err
		}
		return errors.Join(s.writeFile("backup_label", label), s.writeFile("standby.signal", ""))
	})
}

// notInBackup tells what is of the running primary only. The WAL is left out
// because the standby streams it.
func notInBackup(rel string, d fs.DirEntry) bool {
	if rel == "postmaster.pid" || rel == "postmaster.opts" || strings.HasPrefix(d.Name(), "pgsql_tmp") {
		return true
	}
	parent := strings.Split(filepath.Dir(rel), string(filepath.Separator))[0]
	if parent == "pg_wal" {
		return !d.IsDir()
	}
	return slices.Contains([]string{
		"pg_dynshmem", "pg_notify", "pg_replslot", "pg_serial", "pg_snapshots", "pg_stat_tmp", "pg_subtrans",
	}, parent)
}

func (p *Postgres) writeFile(name, content string) error {
	path := filepath.Join(p.Dir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return err
	}
	return p.who.own(path)
}

// Promote makes a standby a primary of a new timeline, and waits for it.
func (p *Postgres) Promote(ctx context.Context) error {
	var promoted bool
	err := p.withConn(ctx, "postgres", func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "SELECT pg_promote(true, 60)").Scan(&promoted)
	})
	if err == nil && !promoted {
		err = errors.New("not finished after 60 s")
	}
	if err != nil {
		return fmt.Errorf("promote standby: %w", err)
	}
	return nil
}
