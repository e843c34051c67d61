package deadletter

import (
	"strings"

	"github.com/walpost/walpost/outbox"
)

// Class is the class of a failure: what stands before its colon.
func Class(failure string) string {
	class, _, _ := strings.Cut(failure, ":")
	return class
}

// Cure is what helps where a row fails again in every retry until something else than an outage has ended: it
// comes back with every value as it was. "" is for the other classes.
func Cure(class string) string {
	const producer = "correct the producer, insert a new event, and discard this one"
	switch class {
	case outbox.RowSubject, outbox.RowHeaders, outbox.RowEncoding, outbox.RowUnreadable:
		return "a retry fails again, because the row stays as it is: " + producer
	case outbox.RowSize:
		return "a retry fails again until max_payload or the stream's max_msg_size is raised; " +
			"or insert a smaller event, and discard this one"
	case outbox.RowSchema:
		return "a retry fails again until the catalogue takes the payload and the relay is restarted; or " +
			producer
	}
	return ""
}
