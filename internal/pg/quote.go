package pg

import "strings"

// QuoteLiteral quotes a string of SQL. Identifiers are quoted by outbox.QuoteIdent.
func QuoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
