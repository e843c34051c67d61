// Package fallback is the table's side of the relay: what the WAL does not say
// or cannot do is read from, or written to, the outbox table itself. Here rows
// are marked when they are stored, recorded when they fail, and looked up when
// the WAL brings them a second time.
//
// All of it happens on one connection, which holds the advisory lock that makes
// its owner the one active relay: who loses the connection loses the right to
// write.
package fallback
