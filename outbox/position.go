package outbox

import (
	"fmt"
	"strconv"
	"strings"
)

// Position says where in the WAL a message comes from. It bounds look-ups and
// orders reports; it never proves that a row was stored.
type Position struct {
	// SystemID and Timeline identify the WAL that the LSNs belong to.
	SystemID string
	Timeline uint32
	// Commit is the LSN of the transaction's commit record (Begin's final LSN).
	Commit LSN
	// N is the ordinal of the INSERT in its transaction, from 1, counting every
	// INSERT message that the server sends, whatever its table.
	N uint32
	// Passed is the greatest insert LSN under which the poller had proven rows
	// when the message was sent; zero where it never did.
	Passed LSN
}

// Append appends the header form, "<system id>/<timeline>/<commit>/<n>/<passed>".
func (p Position) Append(dst []byte) []byte {
	dst = append(dst, p.SystemID...)
	dst = append(dst, '/')
	dst = strconv.AppendUint(dst, uint64(p.Timeline), 10)
	dst = append(dst, '/')
	dst = p.Commit.Append(dst)
	dst = append(dst, '/')
	dst = strconv.AppendUint(dst, uint64(p.N), 10)
	dst = append(dst, '/')
	return p.Passed.Append(dst)
}

func (p Position) String() string { return string(p.Append(nil)) }

// Covers reports whether a transaction position (commit, n) of the same WAL
// lies at or below p.
func (p Position) Covers(commit LSN, n uint32) bool {
	return commit < p.Commit || commit == p.Commit && n <= p.N
}

// maxPosition is longer than every position that a server writes.
const maxPosition = 200

// ParsePosition reads the header form.
func ParsePosition(s string) (Position, error) {
	if len(s) > maxPosition {
		return Position{}, fmt.Errorf("parse a position of %d bytes: at most %d", len(s), maxPosition)
	}
	f := strings.Split(s, "/") // each LSN has a slash
	if len(f) != 7 || f[0] == "" {
		const want = "<system id>/<timeline>/<commit LSN>/<n>/<passed LSN>"
		return Position{}, fmt.Errorf("parse position %q: want %s", s, want)
	}
	tl, err := strconv.ParseUint(f[1], 10, 32)
	if err != nil {
		return Position{}, fmt.Errorf("parse position %q: timeline: %w", s, err)
	}
	commit, err := joinLSN(f[2], f[3])
	if err != nil {
		return Position{}, fmt.Errorf("parse position %q: commit LSN: %w", s, err)
	}
	n, err := strconv.ParseUint(f[4], 10, 32)
	if err != nil {
		return Position{}, fmt.Errorf("parse position %q: ordinal: %w", s, err)
	}
	passed, err := joinLSN(f[5], f[6])
	if err != nil {
		return Position{}, fmt.Errorf("parse position %q: passed LSN: %w", s, err)
	}
	return Position{SystemID: f[0], Timeline: uint32(tl), Commit: commit, N: uint32(n), Passed: passed}, nil
}
