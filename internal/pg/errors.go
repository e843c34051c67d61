package pg

import (
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// Code is the SQLSTATE of PostgreSQL's error in err's tree, or "". Package pgerrcode names them.
func Code(err error) string {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}

// Classes of SQLSTATEs: the first two characters. The functions that pgerrcode has for a class know its
// documented codes only, and a trigger may raise any other.
const (
	DataException                = "22"
	IntegrityConstraintViolation = "23"
	SyntaxErrorOrAccessRule      = "42"
	WithCheckOptionViolation     = "44"
	ProgramLimitExceeded         = "54"
	PLpgSQLError                 = "P0"
	InternalError                = "XX"
)

// InClass reports whether err is an error of PostgreSQL and its SQLSTATE is of one of the classes.
func InClass(err error, classes ...string) bool {
	code := Code(err)
	return len(code) >= 2 && slices.Contains(classes, code[:2])
}
