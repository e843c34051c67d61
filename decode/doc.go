// Package decode turns pgoutput messages, the payloads of XLogData, into
// outbox events.
//
// The decoder is total: whatever the bytes are, it answers with a message or
// with an error. It checks every length before it reads and before it
// allocates, it does not panic and it does not log.
//
// Only protocol 1 is spoken, where a transaction arrives whole and after its
// commit. Tuples are text; a binary value is an error, because the session does
// not ask for any. A content hash is taken over the text, so the session must
// render it under datestyle ISO, timezone UTC, bytea_output hex, extra_float_digits 3 and
// client_encoding UTF8.
package decode
