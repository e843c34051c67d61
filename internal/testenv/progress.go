package testenv

import (
	"fmt"
	"strings"
)

const (
	// Settled is the progress of a row of outbox_known: an id.
	Settled = `(SELECT nullif(lower(r), '-9223372036854775808') - 1
		FROM unnest(unsettled) r WHERE upper_inf(r))`
	// Holes are the ids below it that searches look at.
	Holes = `coalesce(unsettled - int8multirange(int8range(` + Settled + `, NULL, '()')), '{}')`
)

// SettledTo is a statement that has outbox_known say how far the progress of an outbox is. The outbox has its
// table's name, which needs no quotes. A relay that begins then takes the progress for another database's.
func SettledTo(outbox string, id int64, holes string) string {
	return strings.NewReplacer("{partitions}", PartitionsOf(outbox), "{outbox}", outbox,
		"{id}", fmt.Sprint(id), "{holes}", holes).Replace(`
		INSERT INTO public.outbox_known (outbox, condition, database_oid, own_oid, table_oid, timeline,
			partitions, table_name, source, unsettled)
		VALUES ('{outbox}', '', 0, 0, '{outbox}'::regclass, 1,
			{partitions}, '{outbox}', 'test',
			int8multirange(int8range({id}, NULL, '()')) + '{{holes}}')
		ON CONFLICT (outbox, hashtextextended(condition, 0))
			DO UPDATE SET unsettled = EXCLUDED.unsettled`)
}

// PartitionsOf is what outbox_known says of the partitions of a table, whose name needs no quotes.
func PartitionsOf(table string) string {
	return `(SELECT hashtextextended(
			coalesce(string_agg(concat(p.relid::oid, ' ', i.xmin), ' ' ORDER BY p.relid::oid), ''), 0)
		FROM pg_partition_tree('` + table + `') p LEFT JOIN pg_inherits i ON i.inhrelid = p.relid)`
}
