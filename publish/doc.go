// Package publish puts events into a JetStream stream, once and in order.
//
// [Template] and [Envelope] make a message of a row, and [Publisher] sends it and takes the
// PubAcks. Package internal/jetstream has the connection and the stream.
// A [*outbox.RowError] is a row's own fault; every other failure ends the session and
// counts as no attempt.
package publish
