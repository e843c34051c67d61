package table

import "strings"

// A row's last_error begins with one of these where it is not a failure. No failure begins so.
const (
	// Held begins the last_error of a row that waits behind a failed row of its aggregate.
	Held = "held: "
	// Kept begins the last_error of a dead row that stays in its outbox because it is too large to be moved,
	// or the server cannot send it. It has a dead letter, is not tried again, and holds no other row.
	Kept = "kept: "
	// Skipped begins the last_error of rows that are marked and were not to be sent: a first start with
	// postgres.initial "none" passed over them, or they were inserted as processed.
	Skipped = "skipped: "
)

// IsHeld reports whether a row's last_error says that it is held.
func IsHeld(lastError []byte) bool { return strings.HasPrefix(string(lastError), Held) }
