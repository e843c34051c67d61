package outbox

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// MaxShards is the greatest number of relays that the aggregates of one outbox can be
// divided among.
const MaxShards = 64

// Shard is a part of the aggregates of an outbox: those that a hash of their id puts into
// part Index of Of, from 1 on. The zero value is all of them. An aggregate is in one part
// as a whole, and so is a row without one, by its own id.
type Shard struct{ Index, Of int }

// ParseShard reads "1/4". An empty text is the zero value.
func ParseShard(s string) (Shard, error) {
	if s == "" {
		return Shard{}, nil
	}
	index, of, ok := strings.Cut(s, "/")
	i, err1 := strconv.Atoi(index)
	n, err2 := strconv.Atoi(of)
	if !ok || errors.Join(err1, err2) != nil || i < 1 || n < i || n > MaxShards {
		return Shard{}, fmt.Errorf("shard %q: want index/of, as in 1/4, at most %d", s, MaxShards)
	}
	return Shard{i, n}, nil
}

// All reports whether the shard is everything.
func (s Shard) All() bool { return s.Of <= 1 }

func (s Shard) String() string {
	if s == (Shard{}) {
		return ""
	}
	return fmt.Sprintf("%d/%d", s.Index, s.Of)
}

// ShardSQL is the condition, over an alias of the table, under which a row is in the
// table's shard, and "" where every row is; without an alias it is one for a publication's
// row filter, in which no cast that runs a type's own code is allowed, and no type's hash
// function need be named. Hashes are the same in every version of PostgreSQL: a table that
// is partitioned by them outlives an upgrade, too.
func (t *Table) ShardSQL(alias string) string {
	if t.Shard.All() {
		return ""
	}
	return fmt.Sprintf("%s = %d", t.ShardKeySQL(alias), t.Shard.Index-1)
}

// ShardKeySQL is the expression that tells the shards apart.
func (t *Table) ShardKeySQL(alias string) string {
	if alias != "" {
		alias += "."
	}
	hash := func(f Field) string { return HashRecordSQL(alias + t.Column(f)) }
	key := hash(ID)
	if t.Layout.Has(AggregateID) {
		key = fmt.Sprintf("CASE WHEN %s%s IS NULL THEN %s ELSE %s END",
			alias, t.Column(AggregateID), key, hash(AggregateID))
	}
	return fmt.Sprintf("abs(%s %% %d)", key, t.Shard.Of)
}

// ShardIndexes are the statements for indexes, the same for all shards, by which the searches
// of a shard pass over the others' rows. There are none without shards.
func (t *Table) ShardIndexes() (sql []string) {
	if t.Shard.All() {
		return nil
	}
	where := ""
	if pending := t.PendingSQL(""); pending != "true" {
		where = " WHERE " + pending
	}
	columns := []string{t.Column(ID)}
	if t.Layout.Has(AvailableAt) {
		columns = append(columns, t.Column(AvailableAt)+", "+t.Column(ID))
	}
	for _, c := range columns {
		index := fmt.Sprintf("CREATE INDEX ON %s ((%s), %s)%s", t.SQL(), t.ShardKeySQL(""), c, where)
		sql = append(sql, index)
	}
	return sql
}
