package relay

import (
	"context"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
)

// errSlotShared: the relay that holds the lock does not deliver what this one would.
func (s *servers) errSlotShared() error {
	return hint.Errorf(
		"configure both relays with the same outboxes and stream; give this one a postgres.slot, a "+
			"nats.stream and a nats.subject of its own only if it has none of the same rows",
		"the relay that holds the lock of slot %s has other outboxes or another stream: it does not deliver "+
			"what this configuration names", s.cfg.Slot)
}

// compareHolder raises an alarm while the holder of the lock serves something else than this relay, which
// would stand by in vain. It may be a rolling upgrade that adds a table: the relay stays ready.
func (l *leader) compareHolder(ctx context.Context, db *table.DB) error {
	differs, err := db.HolderDiffers(ctx)
	if err != nil {
		return err
	}
	if !differs {
		l.endSlotShared()
		l.status.set(stateStandby, nil)
		return nil
	}
	shared := l.errSlotShared()
	l.status.set(stateStandby, shared)
	if !l.limited("slot_shared", factsAgain) {
		l.alarm(alarm.SlotShared, why(shared)...)
	}
	return nil
}

func (l *leader) endSlotShared() {
	l.over("slot_shared", alarm.SlotShared)
}
