package relay

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
)

// starter makes a start: it checks both servers and fills in what is known of them afterwards. It runs on
// Run's goroutine before the first term; its handlers of NATS events run on the connection's.
type starter struct {
	*reporter
	*servers
	giveUp func(error)          // ends Run
	deny   func(subject string) // tells the current session that it may not publish there

	created time.Time // of the stream; zero where this start has made it
}

// begin prepares, and waits for servers that are away. It fails with what somebody has to put right.
func (s *starter) begin(ctx context.Context) error {
	s.status.set(stateStarting, nil)
	b := backoff{least: 100 * time.Millisecond, most: 5 * time.Second}
	said := ""
	for {
		err := s.prepare(ctx)
		s.failing(err)
		if err == nil && said != "" {
			s.log.Info("the servers are there, the start goes on")
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || !isTemporary(err) {
			return err
		}
		if text := err.Error(); text != said || !s.limited("start", time.Minute) {
			s.limited("start", 0)
			s.log.Warn("start waits for a server, and tries again", why(err)...)
			said = text
		}
		b.wait(ctx)
	}
}

// isTemporary reports whether what keeps a start from going on may pass without anybody's help: the server is
// down, starting, without a leader or full, or its name does not resolve yet. What the server refuses (a
// password, a database, a table) does not.
func isTemporary(err error) bool {
	if code := pg.Code(err); code != "" {
		// Starting up or shutting down, too many connections, a lock, a full disk.
		soon := []string{
			pgerrcode.AdminShutdown, pgerrcode.CrashShutdown, pgerrcode.CannotConnectNow,
			pgerrcode.TooManyConnections,
		}
		return slices.Contains(soon, code) || table.IsTemporary(err)
	}
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return apiIsTemporary(api)
	}
	return natsIsTemporary(err) || networkIsTemporary(err)
}

// apiIsTemporary: JetStream has no leader, or not the servers that it needs. Limits and a JetStream that is
// off remain.
func apiIsTemporary(err *jetstream.APIError) bool {
	const noPeers, notEnabled, notEnabledForAccount, noReplicas = 10005, 10076, 10039, 10074
	switch err.ErrorCode {
	case noPeers:
		return true
	// the last two: no room within the limits
	case notEnabled, notEnabledForAccount, noReplicas, 10023, 10047:
		return false
	}
	return err.Code >= 500
}

// natsIsTemporary knows the client's own errors. Without responders JetStream may be starting, or electing a
// leader.
func natsIsTemporary(err error) bool {
	return slices.ContainsFunc([]error{
		nats.ErrNoServers, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected,
		nats.ErrConnectionClosed, nats.ErrStaleConnection,
		nats.ErrReconnectBufExceeded, nats.ErrMaxConnectionsExceeded, nats.ErrMaxAccountConnectionsExceeded,
	}, func(target error) bool { return errors.Is(err, target) })
}

func networkIsTemporary(err error) bool {
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.Is(err, fs.ErrPermission): // of a socket
		return false
	case errors.As(err, &dns):
		return true
	case errors.As(err, &op):
		return !strings.HasSuffix(op.Op, " error") // an alert of TLS: "remote error"
	}
	return slices.ContainsFunc([]error{
		io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, os.ErrDeadlineExceeded,
		context.DeadlineExceeded,
	}, func(target error) bool { return errors.Is(err, target) })
}
