package relay

import (
	"errors"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// reason is the label of a session's end.
func reason(err error) string {
	switch {
	case errors.Is(err, stream.ErrSlotActive):
		return "slot_active"
	case errors.Is(err, ErrRival):
		return "rival"
	case errors.Is(err, publish.ErrChain):
		return "chain"
	case errors.Is(err, publish.ErrDoubtful):
		return "duplicate"
	case errors.Is(err, publish.ErrAckTimeout):
		return "ack_timeout"
	case errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrReconnectBufExceeded):
		return "nats_away"
	case errors.Is(err, publish.ErrNoResponders):
		return "no_responders"
	case errors.Is(err, stream.ErrPublicationSkipped):
		return "publication_skipped"
	case errors.Is(err, stream.ErrSlotLost), errors.Is(err, stream.ErrNoSlot):
		return "slot_lost"
	case errors.Is(err, errOverBudget):
		return "over_budget"
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return "stream_gone"
	case errors.Is(err, errStreamReplaced):
		return "stream_replaced"
	case errors.Is(err, errStreamUnfit):
		return "stream_unfit"
	case pg.Code(err) != "":
		return "postgres_" + pg.Code(err)
	case table.Away(err):
		return "postgres_away"
	case publish.ClassOf(err) != publish.ClassUnknown:
		return "jetstream_" + publish.ClassOf(err).String()
	}
	return "other"
}
