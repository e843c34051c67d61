package catalog

import (
	"fmt"
)

// Replay says what happens when consumers get an event a second time on purpose.
type Replay string

const (
	// ReplaySafe: nothing happens twice.
	ReplaySafe Replay = "safe"
	// ReplayUnsafe: a consumer would act again. [Entry.ReplayNote] says what to do.
	ReplayUnsafe Replay = "unsafe"
)

// Entry is one version of one event type.
type Entry struct {
	// Name is the event_type, Version the event_version, from 1 to 32,767.
	Name    string
	Version int
	// Owner may change the event: a team or a service, the same for all versions.
	Owner string
	// Description says what has happened.
	Description string
	// AggregateType is the aggregate_type of the rows; empty is not said.
	AggregateType string
	// Consumers are the names of those that read the event, as they are known.
	Consumers []string
	Replay    Replay
	// ReplayNote says what to see to before a replay; required where it is unsafe.
	ReplayNote string
	// File and Line are where the entry begins, in the catalogue.
	File string
	Line int

	schema     node
	schemaFile string // as the entry names it
	compiled   *budgeted
	faulty     bool // it has a problem with which it cannot be used
}

func (e *Entry) at() place { return place{e.File, e.Line} }

// String is as in "order.placed version 2".
func (e *Entry) String() string { return fmt.Sprintf("%s version %d", e.Name, e.Version) }

// Schema is the JSON Schema of the payload, as encoding/json decodes it with [encoding/json.Number]. Do not
// change it.
func (e *Entry) Schema() any { return e.schema.schema }
