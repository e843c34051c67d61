// Package table is the SQL of outbox tables: it looks rows up when the WAL
// brings them a second time, marks those that are stored, records those that
// fail, and searches for those that the WAL does not deliver.
//
// All of it happens on one connection, which holds the advisory lock that makes
// its owner the one active relay: who loses the connection loses the right to
// write.
package table
