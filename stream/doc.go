// Package stream owns the replication connection: it checks that the server can
// be streamed, keeps publication and slot, reads the WAL through package decode
// and tells PostgreSQL what it may forget.
//
// A [Session] reads; a [Tracker] knows what is settled. The two meet only in
// the standby status, which goes out on its own ticker, whatever the
// reader is waiting for.
package stream
