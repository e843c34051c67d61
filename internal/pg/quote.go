package pg

import "github.com/walpost/walpost/outbox"

// QuoteLiteral quotes a string of SQL. Identifiers are quoted by outbox.QuoteIdent.
func QuoteLiteral(s string) string { return outbox.QuoteLiteral(s) }
