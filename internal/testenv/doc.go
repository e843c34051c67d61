// Package testenv runs private servers on loopback: PostgreSQL clusters with
// their standbys, NATS servers as a library or as a process that can be
// killed, and a TCP proxy that can cut what lies between.
//
// The Start functions take a context and return errors, for programs; the New
// functions wrap them for tests, which fail or clean up by themselves.
//
// Everything lives in one temporary directory per process. A janitor, a shell
// that waits for this process to end in whatever way, stops the servers and
// removes the directory; [Cleanup] does the same earlier and waits for it.
package testenv
