// Package outbox holds the words that the rest of walpost is written in: an
// [Event] read from an outbox table, the [Layout] that says which column is
// which, the [LSN] and [Position] that say where in the WAL it was committed,
// and the [Ref] that names it for ever.
//
// Everything points at this package; it points at the standard library only.
// Producers use [Insert] to write an event in their own transaction.
package outbox
