package jetstream

import (
	"fmt"

	"github.com/nats-io/nats.go/jetstream"
)

// Batching is how a publisher may hand many messages over as one.
type Batching string

const (
	// BatchAuto is BatchFast or BatchAtomic where the stream allows it, in this order,
	// and BatchSingle elsewhere and in a shared stream.
	BatchAuto Batching = "auto"
	// BatchSingle publishes each message by itself, with a PubAck of its own.
	BatchSingle Batching = "single"
	// BatchAtomic publishes up to 1,000 messages as one: all of them become visible
	// together, and the rows of one transaction are in one batch if they fit. It needs
	// allow_atomic and nats-server 2.12.1.
	BatchAtomic Batching = "atomic"
	// BatchFast publishes messages one after the other, with one PubAck for as many as
	// have come meanwhile. It needs allow_batched and nats-server 2.14.
	BatchFast Batching = "fast"
)

// Resolve says what a publisher does in a stream: what the stream does not allow, see
// [Stream.Judge], is BatchSingle.
func (b Batching) Resolve(stream *jetstream.StreamConfig, shared bool) Batching {
	auto := b == BatchAuto
	switch {
	case shared:
		return BatchSingle // no expected sequence would prove a batch
	case stream.AllowBatchPublish && (auto || b == BatchFast):
		return BatchFast
	case stream.AllowAtomicPublish && (auto || b == BatchAtomic):
		return BatchAtomic
	}
	return BatchSingle
}

func (j *judge) batches() {
	b := j.cfg.Batching
	j.refuse(j.cfg.Shared && (b == BatchFast || b == BatchAtomic), "stream-shared-batches",
		fmt.Sprintf("publish.batch is %s in a shared stream, where no expected sequence proves a batch", b),
		"set publish.batch: auto, or give the relay a stream of its own")
	j.refuse(b == BatchFast && !j.c.AllowBatchPublish, "stream-no-fast-batches",
		"publish.batch is fast, and the stream does not allow it",
		"set allow_batched in the stream's configuration, or publish.batch: auto")
	j.refuse(b == BatchAtomic && !j.c.AllowAtomicPublish, "stream-no-atomic-batches",
		"publish.batch is atomic, and the stream does not allow it",
		"set allow_atomic in the stream's configuration, or publish.batch: auto")
}
