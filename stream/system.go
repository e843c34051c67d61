package stream

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// identify asks the server who it is and where its timelines branched off.
func identify(ctx context.Context, conn *pgconn.PgConn) (System, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	id, err := pglogrepl.IdentifySystem(ctx, conn)
	if pg.Code(err) == pgerrcode.SyntaxError { // the server knows the command, so it was not asked
		err = hint.Wrap(err, directHint)
	}
	if err != nil {
		return System{}, fmt.Errorf("identify system: %w", err)
	}
	sys := System{ID: id.SystemID, Timeline: uint32(id.Timeline), Database: id.DBName}
	if sys.Timeline == 1 {
		return sys, nil
	}
	h, err := pglogrepl.TimelineHistory(ctx, conn, id.Timeline)
	if pg.Code(err) == pgerrcode.UndefinedFile { // removed: nothing is known of older timelines
		return sys, nil
	}
	if err != nil {
		return System{}, fmt.Errorf("read history of timeline %d: %w", id.Timeline, err)
	}
	if sys.History, err = parseHistory(h.Content); err != nil {
		return System{}, fmt.Errorf("read history of timeline %d: %w", id.Timeline, err)
	}
	return sys, nil
}

// parseHistory reads a timeline history file: "1\t0/3000000\treason" a line.
func parseHistory(content []byte) (map[uint32]outbox.LSN, error) {
	history := map[uint32]outbox.LSN{}
	lines := bufio.NewScanner(bytes.NewReader(content))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) < 2 {
			return nil, fmt.Errorf("line %q: want timeline and switch point", line)
		}
		tl, err := strconv.ParseUint(f[0], 10, 32)
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
		if history[uint32(tl)], err = outbox.ParseLSN(f[1]); err != nil {
			return nil, err
		}
	}
	return history, lines.Err()
}

// Parent is the timeline that the present one branched off from, 0 where none is known.
func (s System) Parent() (timeline uint32) {
	for tl := range s.History {
		timeline = max(timeline, tl)
	}
	return timeline
}

// Phantom reports whether a position names WAL that this server never had: a
// transaction of a timeline that was left before it committed.
func (s System) Phantom(p outbox.Position) bool {
	if p.SystemID != s.ID || p.Timeline == s.Timeline {
		return false
	}
	left, known := s.History[p.Timeline]
	// A timeline that the history does not name was never part of this WAL.
	return known && p.Commit >= left || !known && (p.Timeline > s.Timeline || s.History != nil)
}

// Comparable reports whether the position's LSNs belong to this server's WAL.
func (s System) Comparable(p outbox.Position) bool {
	if p.SystemID != s.ID {
		return false
	}
	_, known := s.History[p.Timeline]
	return p.Timeline == s.Timeline || known && !s.Phantom(p)
}
