package outbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// AggregateKey names an aggregate of one table: half of a SHA-256 over its name ([Event.AggregateName]). Its
// size is fixed, because rows are hostile: the relay keeps the keys of all aggregates that it holds, and
// their columns may have a megabyte each. The zero key stands for rows of no aggregate. Values that are equal
// but have different texts, as the numeric values 1 and 1.000, name two aggregates.
//
// Two aggregates with one key would wait for each other, and nothing worse. To make such a pair takes a
// collision of 128 bits.
type AggregateKey [16]byte

// longPart is the length from which a column enters the name by its hash, so that
// neither side puts long values together.
const longPart = 1024

// Aggregate is the key of the aggregate that the row belongs to.
func (e *Event) Aggregate() AggregateKey {
	return AggregateKeyOf(e.Values[TenantID], e.Values[AggregateType], e.Values[AggregateID])
}

// AggregateName is the name of the aggregate that the row belongs to, nil where it belongs to none.
func (e *Event) AggregateName() []byte {
	return appendName(nil, e.Values[TenantID], e.Values[AggregateType], e.Values[AggregateID])
}

// AggregateKeyOf is the key of the aggregate that these columns name; nil is NULL or not mapped.
// Rows without an aggregate id belong to none.
func AggregateKeyOf(tenant, kind, id []byte) AggregateKey {
	var buf [256]byte // on the stack, for values of common lengths
	return KeyOfAggregateName(appendName(buf[:0], tenant, kind, id))
}

// KeyOfAggregateName is the key of the aggregate of this name; nil (NULL) is the zero key.
func KeyOfAggregateName(name []byte) AggregateKey {
	if name == nil {
		return AggregateKey{}
	}
	sum := sha256.Sum256(name)
	return AggregateKey(sum[:])
}

// appendName returns nil where there is no id.
func appendName(name, tenant, kind, id []byte) []byte {
	if id == nil {
		return nil
	}
	for _, v := range [...][]byte{tenant, kind, id} {
		name = appendPart(name, v)
	}
	return name
}

// appendPart appends "<length>:<value>/", and for NULL only the slash.
func appendPart(text, v []byte) []byte {
	if v != nil {
		text = strconv.AppendInt(text, int64(len(v)), 10)
		text = append(text, ':')
		if len(v) > longPart {
			sum := sha256.Sum256(v)
			text = hex.AppendEncode(text, sum[:])
		} else {
			text = append(text, v...)
		}
	}
	return append(text, '/')
}

// AggregateNameSQL is the SQL expression (text) that computes the [Event.AggregateName] of what stands for
// the table's three columns; "NULL" is one that is not mapped. The server does not compute the key: that
// costs it more than all else about a row.
func (t *Table) AggregateNameSQL(tenant, kind, id string) string {
	return fmt.Sprintf("CASE WHEN %s IS NOT NULL THEN concat(%s, '/', %s, '/', %s, '/') END",
		id, partSQL(tenant, t.Text[TenantID]),
		partSQL(kind, t.Text[AggregateType]),
		partSQL(id, t.Text[AggregateID]))
}

// AggregateHashSQL is an expression that an index can have, of the columns that tell aggregates apart: a hash
// of fixed size, whatever they hold. Aggregates that differ may share it. It is empty where the layout knows
// no aggregates.
func (t *Table) AggregateHashSQL(alias string) string {
	if !t.Layout.Has(AggregateID) {
		return ""
	}
	if alias != "" {
		alias += "."
	}
	var columns []string
	for _, f := range []Field{TenantID, AggregateType, AggregateID} {
		if t.Layout.Has(f) {
			columns = append(columns, alias+t.Column(f))
		}
	}
	return HashRecordSQL(columns...)
}

// HashRecordSQL hashes values: the same in every version of PostgreSQL, and immutable.
func HashRecordSQL(values ...string) string {
	return "hash_record_extended(ROW(" + strings.Join(values, ", ") + "), 0)"
}

// partSQL renders a value with concat(), as [Table.HashSQL] does; a text is its own rendering. Of a text that
// no message can have, and no event, only the length is part of the name.
func partSQL(column string, text bool) string {
	rendered, long := "concat("+column+")", ""
	if text {
		rendered = column + "::text"
		long = fmt.Sprintf("WHEN %s THEN concat(octet_length(%s), ':') ", overlongSQL(column), rendered)
	}
	return fmt.Sprintf(`CASE WHEN %[1]s IS NOT DISTINCT FROM NULL THEN NULL WHEN octet_length(%[2]s) <= %[3]d
		THEN concat(octet_length(%[2]s), ':', %[1]s)
		%[4]sELSE concat(octet_length(%[2]s), ':', encode(%[5]s, 'hex')) END`,
		column, rendered, longPart, long, sha256SQL(rendered))
}

// sha256SQL hashes the bytes as the server keeps them: a conversion into the client's encoding fails
// where they are not valid in it, and one such row would make every search fail.
func sha256SQL(text string) string {
	return "sha256(convert_to(" + text + ", getdatabaseencoding()))"
}
