package hint

import "errors"

// Coded gives an error a stable name, for programs: kebab-case, as in "table-missing". Its text stays as it
// is. A nil err stays nil.
func Coded(code string, err error) error {
	if err == nil {
		return nil
	}
	return &coded{err: err, code: code}
}

// coded is an error with a name. Nobody branches on it, they ask CodeOf.
type coded struct {
	err  error
	code string
}

func (e *coded) Error() string { return e.err.Error() }
func (e *coded) Unwrap() error { return e.err }

// CodeOf returns the outermost code found in err's tree, or "".
func CodeOf(err error) string {
	var c *coded
	if errors.As(err, &c) {
		return c.code
	}
	return ""
}
