// Pgversions prints the PostgreSQL installations that the tests use, the
// default first, and fails where there is none.
package main

import (
	"fmt"
	"os"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

func main() {
	all, err := pgbin.All()
	for _, b := range all {
		fmt.Println(b)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		if advice := hint.Of(err); advice != "" {
			fmt.Fprintln(os.Stderr, "hint:", advice)
		}
		os.Exit(1)
	}
}
