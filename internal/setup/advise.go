package setup

import (
	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
)

// advise says how to go on after a step that failed.
func advise(err error) string {
	const again = "run `walpost init` again: it goes on from there"
	if h := hint.Of(err); h != "" {
		return h + "; then " + again
	}
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		return "run the statement as a role that may, such as a superuser; then " + again
	}
	return "put it right; then " + again
}
