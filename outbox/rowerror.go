package outbox

import "time"

// The classes of a [RowError]. They are label values of outbox_failures_total.
const (
	RowSubject    = "subject"    // no usable subject can be built from the row
	RowUncovered  = "uncovered"  // the stream does not listen on the row's subject
	RowPermission = "permission" // the server does not let the relay publish on it
	RowHeaders    = "headers"    // an attribute is missing or the headers are too large
	RowSize       = "size"       // the message is larger than the server or the stream takes
	RowEncoding   = "encoding"   // a value is no UTF-8
	RowUnreadable = "unreadable" // the database cannot send a value of the row
	RowDuplicate  = "duplicate"  // JetStream took it for another message that it no longer has
	RowSchema     = "schema"     // the payload does not fit the event catalogue
)

// RowClasses are all of them.
var RowClasses = []string{
	RowSubject, RowUncovered, RowPermission, RowHeaders, RowSize, RowEncoding, RowUnreadable, RowDuplicate,
	RowSchema,
}

// RowError is a row's own fault: it would come back however often the row was
// sent, so the row is parked and the publisher goes on. Nothing else is a RowError,
// an outage least of all.
type RowError struct {
	Class string // one of the Row constants
	// Reason is one line of printable ASCII, short enough for last_error.
	Reason string
	// Wait is how long the same would come back, zero where time makes no difference.
	Wait time.Duration
}

func (e *RowError) Error() string { return e.Class + ": " + e.Reason }
