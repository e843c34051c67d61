package decode

import "fmt"

// MissingColumnError is the answer to an INSERT whose relation lacks a column
// that the layout maps: it was dropped or renamed, the publication's column
// list leaves it out, or it is a generated column, which is not published.
type MissingColumnError struct {
	Table  string // schema.table
	Column string
}

func (e *MissingColumnError) Error() string {
	return fmt.Sprintf("table %s is published without column %q, which the layout names", e.Table, e.Column)
}

// ProtocolError is the answer to a message of a protocol that was not asked
// for.
type ProtocolError struct {
	Type    byte
	Name    string
	Version int
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("decode message %q: %s: protocol %d was not asked for", e.Type, e.Name, e.Version)
}

// UnknownMessageError is the answer to a message of no known protocol.
type UnknownMessageError struct{ Type byte }

func (e *UnknownMessageError) Error() string {
	return fmt.Sprintf("decode message %q: no such message in pgoutput's protocols 1 to 4", e.Type)
}

// refuse names what a message that is not of protocol 1 would be.
func refuse(kind byte) error {
	switch kind {
	case 'S', 'E', 'c', 'A':
		return &ProtocolError{Type: kind, Name: "stream of an in-progress transaction", Version: 2}
	case 'b', 'P', 'K', 'r', 'p':
		return &ProtocolError{Type: kind, Name: "prepared transaction", Version: 3}
	}
	return &UnknownMessageError{Type: kind}
}
