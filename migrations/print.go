package migrations

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/walpost/walpost/outbox"
)

// Print writes the migrations up to and including the version, or [Latest], as plain SQL without annotations: what up
// would do in a database whose first schema is public. Each part says which file it comes from.
func Print(w io.Writer, to int64, outboxes []*outbox.Table) error {
	if to != Latest {
		if err := checkTarget(to, 1); err != nil {
			return err
		}
	}
	var b bytes.Buffer
	b.WriteString("-- The tables of walpost, for a migration tool of your own or for psql:\n" +
		"--   psql --single-transaction --set ON_ERROR_STOP=1 --file=FILE\n" +
		"-- A database gets them from here or from `walpost migrate up`, never from both.\n")
	for _, m := range All() {
		if m.Version > to {
			break
		}
		if m.Version == outboxVersion && !ownsOutbox(outboxes, "public") {
			fmt.Fprintf(&b, "\n-- %s is left out: the outbox is another table.\n", m.Name)
			continue
		}
		up, err := upSection(m.Name)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "\n-- From %s\n\n%s\n", m.Name, up)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// upSection is the part of a file between its Up and its Down annotation, without other annotations.
func upSection(name string) (string, error) {
	data, err := files.ReadFile(name)
	if err != nil {
		return "", err
	}
	var out []string
	inUp := false
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		line := lines.Text()
		if command, ok := strings.CutPrefix(line, "-- +goose "); ok {
			switch command {
			case "Up":
				inUp = true
			case "Down":
				inUp = false
			}
			continue
		}
		if inUp {
			out = append(out, line)
		}
	}
	return strings.TrimSpace(strings.Join(out, "\n")), nil
}
