package badinput

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// psql runs a script as the program of that name does, which is not everywhere, as far as
// deploy/grants.sql goes: variables, \set, \gset and \if.
type psql struct {
	t    *testing.T
	conn *pgx.Conn
	vars map[string]string
	open []branch
}

// branch is an \if: whether its present part is on, and whether one was or none may be.
type branch struct{ on, over bool }

func (p *psql) run(script string) {
	p.t.Helper()
	var statement string
	for line := range strings.Lines(script) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, `\`) {
			p.meta(strings.Fields(line))
		} else if line != "" && !strings.HasPrefix(line, "--") && p.on() {
			statement += p.interpolate(line) + "\n"
		}
		sql, gset := strings.CutSuffix(statement, "\\gset\n")
		if gset || strings.HasSuffix(statement, ";\n") {
			p.execute(sql, gset)
			statement = ""
		}
	}
	if statement != "" || len(p.open) > 0 {
		p.t.Fatalf("the script ends within %q, with %d \\if open", statement, len(p.open))
	}
}

func (p *psql) on() bool { return len(p.open) == 0 || p.open[len(p.open)-1].on }

func (p *psql) meta(words []string) {
	p.t.Helper()
	last := len(p.open) - 1
	switch words[0] {
	case `\set`:
		if p.on() {
			p.vars[words[1]] = words[2]
		}
	case `\if`:
		on := p.on() && p.truth(words[1])
		p.open = append(p.open, branch{on: on, over: on || !p.on()})
	case `\elif`:
		b := &p.open[last]
		b.on = !b.over && p.truth(words[1])
		b.over = b.over || b.on
	case `\else`:
		b := &p.open[last]
		b.on, b.over = !b.over, true
	case `\endif`:
		p.open = p.open[:last]
	default:
		p.t.Fatalf("no %s here", words[0])
	}
}

// truth is that of :{?name}, whether a variable is set, or of :name, which holds a boolean.
func (p *psql) truth(word string) bool {
	p.t.Helper()
	if name, ok := strings.CutPrefix(word, ":{?"); ok {
		_, set := p.vars[strings.TrimSuffix(name, "}")]
		return set
	}
	value := p.interpolate(word)
	if value != "t" && value != "f" {
		p.t.Fatalf("%s is %q, which is no boolean", word, value)
	}
	return value == "t"
}

var psqlVariable = regexp.MustCompile(`:(["']?)(\w+)["']?`)

func (p *psql) interpolate(line string) string {
	return psqlVariable.ReplaceAllStringFunc(line, func(s string) string {
		m := psqlVariable.FindStringSubmatch(s)
		value, set := p.vars[m[2]]
		switch {
		case !set:
			p.t.Fatalf("%s is not set", s)
		case m[1] == `"`:
			return pgx.Identifier{value}.Sanitize()
		case m[1] == `'`:
			return "'" + strings.ReplaceAll(value, "'", "''") + "'"
		}
		return value
	})
}

// execute runs a statement; with \gset the columns of its row become variables.
func (p *psql) execute(sql string, gset bool) {
	p.t.Helper()
	results, err := p.conn.PgConn().Exec(p.t.Context(), sql).ReadAll()
	if err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
	if gset {
		for i, f := range results[0].FieldDescriptions {
			p.vars[f.Name] = string(results[0].Rows[0][i])
		}
	}
}
