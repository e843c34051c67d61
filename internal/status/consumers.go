package status

import "github.com/walpost/walpost/internal/consumers"

// Consumer is one as `walpost consumers list --json` prints it.
type Consumer struct {
	*consumers.Consumer
	// StreamLast is the last sequence of its stream, nil where that is not known.
	StreamLast *uint64 `json:"stream_last_sequence"`
}

// Behind is how far a sequence is behind the stream's end.
func (c Consumer) Behind(sequence uint64) (n uint64, known bool) {
	if c.StreamLast == nil {
		return 0, false
	}
	return max(*c.StreamLast, sequence) - sequence, true
}

// WithEnds asks for the end of each stream, once.
func WithEnds(all []*consumers.Consumer, end func(stream string) *uint64) []Consumer {
	ends := map[string]*uint64{}
	with := make([]Consumer, len(all))
	for i, c := range all {
		last, asked := ends[c.Stream]
		if !asked {
			last = end(c.Stream)
			ends[c.Stream] = last
		}
		with[i] = Consumer{c, last}
	}
	return with
}
