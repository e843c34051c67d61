// Package bench measures a relay between a PostgreSQL server and a NATS server:
//
//   - how fast the relay delivers the rows of a backlog;
//   - how fast pg_recvlogical reads the same rows from the walsender, without a relay;
//   - how fast JetStream stores the same messages, without a relay;
//   - how long a row takes from its commit to its PubAck and to a consumer;
//   - the CPU time and the memory of all three.
//
// It creates a database and streams for that, and removes them.
package bench
