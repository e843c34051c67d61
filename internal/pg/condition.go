package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// ReadCondition returns a condition on a table's row as the server words it, with outbox.RowAlias before each
// column. It is planned only: nothing of it runs.
func ReadCondition(ctx context.Context, conn *pgx.Conn, table, where string) (string, error) {
	if strings.Contains(where, outbox.RowAlias) {
		return "", hint.Errorf("write the columns without it", "the condition names %s", outbox.RowAlias)
	}
	// OFFSET keeps the subquery apart, so that its alias stands before the columns, also of a partitioned
	// table.
	sql := fmt.Sprintf("EXPLAIN (VERBOSE, FORMAT JSON) SELECT ((%s)::pg_catalog.bool) FROM "+
		"(SELECT * FROM %s OFFSET 0) %s", where, table, outbox.RowAlias)
	var text []byte
	if err := conn.QueryRow(ctx, sql).Scan(&text); err != nil {
		return "", explainCondition(err)
	}
	var plans []struct {
		Plan struct {
			Output []string `json:"Output"`
		} `json:"Plan"`
	}
	if err := json.Unmarshal(text, &plans); err != nil {
		return "", fmt.Errorf("read the plan of the condition: %w", err)
	}
	if len(plans) != 1 || len(plans[0].Plan.Output) != 1 {
		return "", errors.New("the plan of the condition has not one column")
	}
	condition := plans[0].Plan.Output[0]
	const advice = "compare columns of the row with constants, as in status <> 4"
	switch words := literals.ReplaceAllString(condition, "''"); {
	case subquery.MatchString(words):
		return "", hint.Errorf(advice, "the condition has a subquery, which no publication can filter by")
	case foreignCall.MatchString(words):
		return "", hint.Errorf(advice,
			"the condition calls a function or an operator that is not PostgreSQL's own")
	}
	return condition, nil
}

var (
	// subquery: the server writes the name of its plan, or the parameter that takes its result.
	subquery = regexp.MustCompile(`(?:Sub|Init)Plan [0-9]|\$[0-9]`)
	literals = regexp.MustCompile(`'(?:[^']|'')*'`)
	// foreignCall: the server writes a schema before the name of what is not in pg_catalog.
	foreignCall = regexp.MustCompile(`[\w"]\.[\w"]+\(|OPERATOR\(`)
)

func explainCondition(err error) error {
	advice := "write an SQL condition on the row's columns, as in status <> 4"
	switch Code(err) {
	case pgerrcode.UndefinedColumn:
		advice = "name columns of the table, in double quotes where they have capital letters"
	case pgerrcode.UndefinedFunction:
		advice = "use functions and operators of PostgreSQL's own, on values of their types"
	case "":
		return err
	case pgerrcode.InsufficientPrivilege, pgerrcode.LockNotAvailable, pgerrcode.QueryCanceled,
		pgerrcode.UndefinedTable:
		return err
	}
	return hint.Wrap(err, advice)
}
