package main

import (
	"testing"
	"time"

	"github.com/walpost/walpost/outbox"
)

// TestKeptFor: how long verify expects the rows of messages follows what retention does.
func TestKeptFor(t *testing.T) {
	canonical := &outbox.Table{Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	events := &outbox.Table{Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
	for _, c := range []struct{ archive, delete, drop, canonical, events time.Duration }{
		{0, 0, 0, 0, 0},
		{time.Hour, 0, 3 * time.Hour, 3 * time.Hour, 0},
		{time.Hour, 2 * time.Hour, 3 * time.Hour, 3 * time.Hour, 2 * time.Hour},
		{0, 2 * time.Hour, 3 * time.Hour, 0, 2 * time.Hour},
	} {
		var cfg Config
		cfg.Retention.ArchiveAfter, cfg.Retention.DeleteAfter, cfg.Retention.DropAfter = c.archive, c.delete, c.drop
		kept := keptFor(&cfg)
		if got := [2]time.Duration{kept(canonical), kept(events)}; got != [2]time.Duration{c.canonical, c.events} {
			t.Errorf("%+v: kept for %v", c, got)
		}
	}
}
