package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// WriterOf is what a message's headers say of its writer: the source, or else the message id, or "".
func WriterOf(h nats.Header) string {
	const most = 200
	writer := unpercent(h.Get("ce-source"))
	if writer == "" {
		writer = h.Get(nats.MsgIdHdr)
	}
	return strings.ToValidUTF8(strings.Clone(writer[:min(len(writer), most)]), "?")
}

// NoWriter is a writer for a log line, where [WriterOf] is "".
const NoWriter = "a program that names no source"

// OwnStream is what to do where another writes into a stream that is to be one relay's alone.
const OwnStream = "give this relay a stream and subjects of its own (nats.stream, nats.subject), " +
	"stop the other writer, or set nats.shared: true"

// OtherWriter returns the writer of the stream's last message, and whether it is another than the relay of
// the source and, where outboxes are named, of one of them. A stream that is shared, or has no message, has
// none.
func (s *Stream) OtherWriter(
	ctx context.Context, info *StreamInfo, source string, outboxes ...string,
) (string, bool, error) {
	if s.cfg.Shared || info.Messages == 0 {
		return "", false, nil
	}
	last, err := s.getMessage(ctx, fmt.Appendf(nil, `{"seq":%d}`, info.LastSeq))
	if errors.Is(err, ErrMessageGone) { // somebody deleted it
		return "", false, nil
	}
	if err != nil {
		return "", false, s.explain("read the last message of", "STREAM.MSG.GET", err)
	}
	h, err := last.headers()
	if err != nil {
		h = nats.Header{} // not the relay's
	}
	id, own := outbox.ParseMessageID(source, h.Get(nats.MsgIdHdr))
	if own && len(outboxes) > 0 && !slices.Contains(outboxes, id.Table) {
		return id.Table, true, nil
	}
	return WriterOf(h), !own, nil
}

// WriterFindings is [Stream.OtherWriter] for doctor.
func (s *Stream) WriterFindings(ctx context.Context, info *StreamInfo, source string) (f check.Findings) {
	writer, other, err := s.OtherWriter(ctx, info, source)
	f.Failed(check.Warn, "stream-unreadable", err)
	if other {
		f.Failed(check.Warn, "stream-writer", hint.Errorf(OwnStream,
			"its last message is not this relay's (%s), but %s", source, described(writer)))
	}
	return f
}

func described(writer string) string {
	if writer == "" {
		return "that of " + NoWriter
	}
	return fmt.Sprintf("that of %q", writer)
}
