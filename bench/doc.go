// Package bench measures a relay between a PostgreSQL server and a NATS server, side
// by side with what each of the two does without it: how fast the walsender lets the
// same rows be read by a program that does nothing else, how fast JetStream takes the
// same messages, how fast the relay drains the one into the other, how long a commit
// takes to arrive, and what CPU time and memory that costs.
//
// It works in a database and a stream of its own, and removes both.
package bench
