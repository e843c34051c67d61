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
// column. It is planned only; but to plan it, functions of constants are called, and those of the table's
// indexes.
func ReadCondition(ctx context.Context, conn *pgx.Conn, table, where string) (string, error) {
	if strings.Contains(where, outbox.RowAlias) {
		return "", hint.Errorf("write the columns without it", "the condition names %s", outbox.RowAlias)
	}
	// OFFSET keeps the subquery apart, so that its alias stands before the columns, also of a partitioned
	// table.
	condition, err := readOutput(ctx, conn, fmt.Sprintf("SELECT ((%s)::pg_catalog.bool) FROM "+
		"(SELECT * FROM %s OFFSET 0) %s", where, table, outbox.RowAlias))
	if err != nil {
		return "", err
	}
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

// ReadConditionWhere is what the planner leaves of a condition where a column has a value.
func ReadConditionWhere(
	ctx context.Context, conn *pgx.Conn, table, where, column, typ, value string,
) (string, error) {
	columns, err := ReadColumnNames(ctx, conn, table)
	if err != nil {
		return "", err
	}
	for i, c := range columns {
		if columns[i] = outbox.QuoteIdent(c); c == column {
			columns[i] = outbox.QuoteLiteral(value) + "::" + typ + " AS " + columns[i]
		}
	}
	return readOutput(ctx, conn, fmt.Sprintf("SELECT ((%s)::pg_catalog.bool) FROM (SELECT %s FROM %s) %s",
		where, strings.Join(columns, ", "), table, outbox.RowAlias))
}

// ReadColumnNames are the columns of a table.
func ReadColumnNames(ctx context.Context, conn *pgx.Conn, table string) ([]string, error) {
	rows, _ := conn.Query(ctx, `SELECT attname::text FROM pg_attribute
		WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, table)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// readOutput is the only column of a query, as the planner has it.
func readOutput(ctx context.Context, conn *pgx.Conn, query string) (string, error) {
	var text []byte
	err := conn.QueryRow(ctx, "EXPLAIN (VERBOSE, FORMAT JSON) "+query).Scan(&text)
	if err != nil {
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
	return plans[0].Plan.Output[0], nil
}

var (
	// subquery: the server writes the name of its plan, or the parameter that takes its result.
	subquery = regexp.MustCompile(`(?:Sub|Init)Plan [0-9]|\$[0-9]`)
	literals = regexp.MustCompile(`'(?:[^']|'')*'`)
	// foreignCall: the server writes a schema before the name of what is not in pg_catalog.
	foreignCall = regexp.MustCompile(`[\w"]\.[\w"]+\(|OPERATOR\(|::"?\w+"?\.`)
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

var (
	// conditionToken is what a plain condition consists of.
	conditionToken = regexp.MustCompile(`^(?:\s+|'(?:[^']|'')*'|"(?:[^"]|"")+"|[A-Za-z_][A-Za-z0-9_]*|` +
		`[0-9]+(?:\.[0-9]+)?|[-+*/<>=~!@#%^&|?:]+|[(),\[\]])`)
	beforeParenthesis = regexp.MustCompile(`^(?i:and|or|not|in|any|all)$`)
	nameStart         = regexp.MustCompile(`^["_A-Za-z]`)
	comment           = regexp.MustCompile(`^[^'"].*?(?:--|/\*)|^--|^/\*`)
	queryWord         = regexp.MustCompile(`^(?i:select|with|values|table)$`)
)

// PlainCondition reports whether a condition only compares: columns without a table, constants, and
// operators, which are PostgreSQL's own on connections of this package. It calls no function and has no
// subquery.
func PlainCondition(condition string) bool {
	before, space := "", true // the token before, and whether spaces follow it
	for condition != "" {
		token := conditionToken.FindString(condition)
		condition = condition[len(token):]
		word := nameStart.MatchString(before)
		switch {
		case token == "", queryWord.MatchString(token), comment.MatchString(token):
			return false
		case token[0] == '\'' && !space && (word || strings.HasSuffix(before, "&")): // E'...', U&'...'
			return false
		case token == "(" && word && !beforeParenthesis.MatchString(before):
			return false
		case strings.TrimSpace(token) == "":
			space = true
			continue
		}
		before, space = token, false
	}
	return true
}
