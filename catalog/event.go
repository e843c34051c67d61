package catalog

import (
	"errors"
	"strconv"

	"github.com/walpost/walpost/outbox"
)

// maxReason is how long the text in last_error is, in bytes.
const maxReason = 400

// CheckEvent is what the relay asks about each row. Its error is a [*outbox.RowError] of the class
// [outbox.RowSchema]. Rows of types and versions that the catalogue does not have pass, unless parkUnknown.
func (c *Catalog) CheckEvent(ev *outbox.Event, parkUnknown bool) error {
	err := c.Validate(string(ev.Values[outbox.EventType]), eventVersion(ev), ev.Values[outbox.Payload])
	if err == nil || errors.Is(err, ErrUnknown) && !parkUnknown {
		return nil
	}
	reason := err.Error()
	var misfit *PayloadError
	if errors.As(err, &misfit) {
		reason = misfit.discreet() // logs and last_error are read by others than payloads
	}
	return &outbox.RowError{Class: outbox.RowSchema, Reason: cut(reason, maxReason)}
}

// eventVersion is 0 where the row has none, and -1, which no catalogue has, where it is no version.
func eventVersion(ev *outbox.Event) int {
	text := ev.Values[outbox.EventVersion]
	if len(text) == 0 {
		return 0
	}
	n, err := strconv.Atoi(string(text))
	if err != nil || n == 0 {
		return -1
	}
	return n
}
