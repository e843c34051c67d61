package outbox

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// AggregateKey names an aggregate of one table: half of a SHA-256 over tenant_id, aggregate_type and
// aggregate_id. Its size is fixed, because rows are hostile: the relay keeps the keys of all aggregates
// that it holds, and their columns may have a megabyte each. The zero key stands for rows of no aggregate.
//
// Two aggregates with one key would wait for each other, and nothing worse: whoever could make such a
// pair has to find a collision of 128 bits.
type AggregateKey [16]byte

// longPart is the length from which a column enters the key by its own hash, so that
// neither side puts long values together.
const longPart = 1024

// Aggregate is the key of the aggregate that the row belongs to.
func (e *Event) Aggregate() AggregateKey {
	return AggregateKeyOf(e.Values[TenantID], e.Values[AggregateType], e.Values[AggregateID])
}

// AggregateKeyOf is the key of the aggregate that these columns name; nil is NULL or not mapped.
// Rows without an aggregate id belong to none. [AggregateKeySQL] computes the same in SQL.
func AggregateKeyOf(tenant, kind, id []byte) AggregateKey {
	if id == nil {
		return AggregateKey{}
	}
	var buf [256]byte // on the stack, for values of common lengths
	text := buf[:0]
	for _, v := range [...][]byte{tenant, kind, id} {
		text = appendPart(text, v)
	}
	sum := sha256.Sum256(text)
	return AggregateKey(sum[:])
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

// ParseAggregateKey reads the text of [AggregateKeySQL]; NULL is the zero key.
func ParseAggregateKey(text []byte) (key AggregateKey, err error) {
	if text == nil {
		return key, nil
	}
	digits, ok := bytes.CutPrefix(text, []byte(`\x`))
	if !ok || len(digits) != hex.EncodedLen(len(key)) {
		return key, fmt.Errorf("read aggregate key %.40q: want \\x and 32 hex digits", text)
	}
	if _, err := hex.Decode(key[:], digits); err != nil {
		return AggregateKey{}, fmt.Errorf("read aggregate key %q: %w", text, err)
	}
	return key, nil
}

// AggregateKeySQL is the SQL expression (bytea) that computes [AggregateKeyOf] of what stands for the table's three
// columns; "NULL" is one that is not mapped.
func (t *Table) AggregateKeySQL(tenant, kind, id string) string {
	text := fmt.Sprintf("concat(%s, '/', %s, '/', %s, '/')",
		partSQL(tenant, t.Text[TenantID]), partSQL(kind, t.Text[AggregateType]), partSQL(id, t.Text[AggregateID]))
	return fmt.Sprintf("CASE WHEN %s IS NOT NULL THEN substr(%s, 1, 16) END", id, sha256SQL(text))
}

// AggregateHashSQL is an expression that an index can have, of the columns that tell aggregates apart: a hash of fixed
// size, whatever they hold. Aggregates that differ may share it. It is empty where the layout knows no aggregates.
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

// partSQL renders a value with concat(), as [Table.HashSQL] does. Of a text that no message can have, and no event, only
// the length is part of the key.
func partSQL(column string, text bool) string {
	long := ""
	if text {
		long = fmt.Sprintf("WHEN %s THEN concat(octet_length(%s::text), ':') ", overlongSQL(column), column)
	}
	return fmt.Sprintf(`CASE WHEN %[1]s IS NOT DISTINCT FROM NULL THEN NULL %[4]sWHEN octet_length(concat(%[1]s)) <= %[2]d
		THEN concat(octet_length(concat(%[1]s)), ':', %[1]s) ELSE concat(octet_length(concat(%[1]s)), ':', encode(%[3]s, 'hex')) END`,
		column, longPart, sha256SQL("concat("+column+")"), long)
}

// sha256SQL hashes the bytes as the server keeps them: a conversion into the client's encoding fails
// where they are not valid in it, and one such row would make every search fail.
func sha256SQL(text string) string {
	return "sha256(convert_to(" + text + ", getdatabaseencoding()))"
}
