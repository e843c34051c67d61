package retention

import (
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
)

// withoutPrivileges replaces all errors about missing privileges with one: they have one remedy.
func (r *pass) withoutPrivileges(all []error) []error {
	var texts, grants []string
	var others []error
	for _, err := range all {
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != pgerrcode.InsufficientPrivilege {
			others = append(others, err)
			continue
		}
		texts = append(texts, refused.Message)
		if _, grant, ok := strings.Cut(hint.Of(err), "owner: "); ok {
			grants = append(grants, grant)
		}
	}
	if len(texts) == 0 {
		return others
	}
	slices.Sort(texts)
	advice := "run `walpost retention` with the owner's postgres.url"
	if len(grants) > 0 {
		advice += ", or as the tables' owner: " + strings.Join(grants, "; ")
	}
	missing := strings.Join(slices.Compact(texts), ", ")
	return append(others, hint.Errorf(advice, "role %s may not archive and delete rows: %s", r.role, missing))
}

// flat takes joined errors apart.
func flat(all []error) (each []error) {
	for _, err := range all {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			each = append(each, flat(joined.Unwrap())...)
		} else if err != nil {
			each = append(each, err)
		}
	}
	return each
}
