package migrations

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Print writes the migrations up to and including the version, or [Latest], as plain SQL: what up would do in
// a schema that has nothing yet. Each part says which file it comes from. Where groups are named, the others
// are left out. Names are resolved as in up: nothing of what others have made in the schema is called.
func Print(w io.Writer, to int64, schema string, outboxes []*outbox.Table, only ...Group) error {
	if to != Latest {
		if err := checkTarget(to, 1, only); err != nil {
			return err
		}
	}
	var b bytes.Buffer
	b.WriteString("-- The tables of walpost, for a migration tool of your own or for psql:\n" +
		"--   psql --single-transaction --set ON_ERROR_STOP=1 --file=FILE\n" +
		"-- A database gets them from here or from `walpost migrate up`, never from both.\n")
	b.WriteString(pg.ScriptHead)
	for _, m := range All(outboxes, schema, only...) {
		if m.Version > to {
			continue
		}
		up := strings.ReplaceAll(m.file.up, schemaMark, outbox.QuoteIdent(schema)+".")
		fmt.Fprintf(&b, "\n-- From %s\n\n%s", m.Name, up)
		if m.Name == canonicalFile {
			b.WriteString(sizeCheck)
		}
	}
	if to == Latest && (len(only) == 0 || slices.Contains(only, Relay)) {
		printShardIndexes(&b, outboxes)
	}
	b.WriteString("\nRESET search_path;\n") // what follows names its schemas
	_, err := w.Write(b.Bytes())
	return err
}

var madeInFile = regexp.MustCompile(`(?m)^CREATE (TABLE|VIEW|FUNCTION) (\{schema\}\.\w+(?:\(\))?)`)

// PrintOwner writes the statements that give a role what [Print] makes for a relay.
func PrintOwner(w io.Writer, owner, schema string, outboxes []*outbox.Table) error {
	var b bytes.Buffer
	for _, m := range All(outboxes, schema, Relay) {
		for _, made := range madeInFile.FindAllStringSubmatch(m.file.up, -1) {
			name := strings.ReplaceAll(made[2], schemaMark, outbox.QuoteIdent(schema)+".")
			fmt.Fprintf(&b, "ALTER %s %s OWNER TO %s;\n", made[1], name, outbox.QuoteIdent(owner))
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// printShardIndexes offers what no migration makes: most tables are of one relay.
func printShardIndexes(b *bytes.Buffer, outboxes []*outbox.Table) {
	for _, t := range outboxes {
		if sql := t.ShardIndexes(); len(sql) > 0 {
			fmt.Fprintf(b, "\n-- For the shards of %s, once for all of them. "+
				"On a table that is written to, use CREATE INDEX CONCURRENTLY.\n\n%s;\n",
				t, strings.Join(sql, ";\n"))
		}
	}
}

// canonicalFile makes outbox_messages.
const canonicalFile = outbox.DefaultTable + "/0001_table.sql"

// sizeCheck is offered and not made: only an operator knows the servers' limits, and it costs every INSERT.
const sizeCheck = `
-- A row that is larger than the NATS server's max_payload, or the stream's max_msg_size, is never delivered.
-- This tells the producer instead, at the price of rendering each payload once more. Leave room for the
-- headers:
-- ALTER TABLE public.outbox_messages ADD CONSTRAINT outbox_messages_payload_size ` +
	"CHECK (octet_length(payload::text) <= 1000000);\n"
