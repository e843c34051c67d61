package jetstream

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// TypeVersion is what a message says of its event: ce-type and ce-eventversion.
type TypeVersion struct{ EventType, Version string }

// EventTypes counts what the messages between two sequences are, by their headers. Messages without a
// ce-type, such as envelopes, are left out. filter is a subject, or "" for all.
func (s *Stream) EventTypes(
	ctx context.Context, from, to uint64, filter string,
) (map[TypeVersion]int, error) {
	all := map[TypeVersion]int{}
	for ; from <= to; from += U {
		err := s.headers(ctx, from, min(from+U-1, to), filter, func(error) {},
			func(_ uint64, _ time.Time, _ string, h nats.Header) {
				one := TypeVersion{unpercent(h.Get("ce-type")), unpercent(h.Get("ce-eventversion"))}
				if one.EventType == "" {
					return
				}
				if _, known := all[one]; !known { // a header's values are pieces of a larger string
					one = TypeVersion{strings.Clone(one.EventType), strings.Clone(one.Version)}
				}
				all[one]++
			})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Subjects counts the messages of each subject that the filter matches. The server answers from its index.
func (s *Stream) Subjects(ctx context.Context, filter string) (map[string]uint64, error) {
	stream, err := s.js.Stream(ctx, s.cfg.Name)
	if err != nil {
		return nil, s.explain("read", "STREAM.INFO", err)
	}
	info, err := stream.Info(ctx, natsjs.WithSubjectFilter(filter))
	if err != nil {
		return nil, s.explain("read", "STREAM.INFO", err)
	}
	return info.State.Subjects, nil
}
