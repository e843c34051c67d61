// Package catalog reads the event catalogue: for each event type and version its owner, its meaning, its
// consumers, whether it may be replayed, and the JSON Schema of its payload. It checks the catalogue itself,
// checks payloads against it, and writes its documents. docs/CATALOG.md has the format.
//
// Applications check what they insert:
//
//	events, err := catalog.LoadDir("catalog")
//	...
//	inserter := outbox.Inserter{Check: events.CheckMessage}
//
// The relay does the same with its key catalog.path.
package catalog
