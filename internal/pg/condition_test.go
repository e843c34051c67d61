package pg

import "testing"

func TestPlainCondition(t *testing.T) {
	t.Parallel()
	for _, c := range []string{
		"status <> 4", "tenant_id = 'a(b)' AND NOT (archived OR \"Kind\" IN ('x', 'y'))", "deleted_at IS NULL",
		"n BETWEEN 1.5 AND 2", "kind = ANY (ARRAY['a', 'b'])", "body ->> 'kind' = 'it''s'", "a IS DISTINCT FROM b", "at > timestamptz '2026-01-01'",
		"x = '--' OR y = '/*'",
	} {
		if !PlainCondition(c) {
			t.Errorf("refused: %s", c)
		}
	}
	for _, c := range []string{
		"evil()", "app.evil() = 1", `"evil" (1)`, "pg_notify('a', 'b') IS NULL", "n IN (SELECT 1)", "n = (select 1)", "n OPERATOR(app.=) 1",
		"n = 1 -- AND x", "n /* */ = 1", "E'\\'' = x", "U&'x' = y", "n = 1; DROP TABLE x", "$$x$$ = y", "(t).evil", "x::app.kind = y", "EXISTS (VALUES (1))",
		"row_to_json (t) IS NULL", "x = 'unclosed", "é(1)", "n = (TABLE x)", "not_evil (1) OR true",
	} {
		if PlainCondition(c) {
			t.Errorf("taken: %s", c)
		}
	}
}
