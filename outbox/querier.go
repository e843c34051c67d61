package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
)

type scanner interface{ Scan(dest ...any) error }

// queryRow knows database/sql by its types and pgx by its shape: this package
// depends on the standard library only, and so does a producer's build.
func queryRow(ctx context.Context, tx any, query string, args []any) (scanner, error) {
	if q, ok := tx.(interface {
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	}); ok {
		return q.QueryRowContext(ctx, query, args...), nil
	}
	if tx == nil {
		return nil, errors.New("no transaction, but nil")
	}
	method := reflect.ValueOf(tx).MethodByName("QueryRow")
	if !method.IsValid() || !isQueryRow(method.Type()) {
		return nil, fmt.Errorf("%T is neither a transaction of database/sql nor one of pgx", tx)
	}
	in := []reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(query), reflect.ValueOf(args)}
	out := method.CallSlice(in)
	row, ok := out[0].Interface().(scanner)
	if !ok {
		return nil, fmt.Errorf("%T returned no row", tx)
	}
	return row, nil
}

// isQueryRow reports whether t is func(context.Context, string, ...any) of a
// row: pgx's QueryRow, whose result has a type that cannot be named here.
func isQueryRow(t reflect.Type) bool {
	return t.IsVariadic() && t.NumIn() == 3 && t.NumOut() == 1 &&
		t.In(0) == reflect.TypeFor[context.Context]() &&
		t.In(1) == reflect.TypeFor[string]() &&
		t.In(2) == reflect.TypeFor[[]any]() &&
		t.Out(0).Implements(reflect.TypeFor[scanner]())
}
