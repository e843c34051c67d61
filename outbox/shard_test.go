package outbox

import "testing"

func TestParseShard(t *testing.T) {
	for s, want := range map[string]Shard{"": {}, "1/1": {1, 1}, "1/4": {1, 4}, "4/4": {4, 4}, "64/64": {64, 64}} {
		got, err := ParseShard(s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("%q is %v, %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"1", "/", "0/4", "5/4", "1/65", "-1/4", "1/4/4", "a/b", "1/", " 1/4"} {
		if got, err := ParseShard(s); err == nil {
			t.Errorf("%q is %v", s, got)
		}
	}
}

func TestShardSQL(t *testing.T) {
	table := &Table{Schema: "public", Name: "o", Layout: Canonical()}
	if got := table.ShardSQL("t"); got != "" {
		t.Errorf("all rows: %s", got)
	}
	table.Shard = Shard{2, 4}
	for alias, want := range map[string]string{
		"t": `abs(CASE WHEN t."aggregate_id" IS NULL THEN hash_record_extended(ROW(t."id"), 0) ELSE hash_record_extended(ROW(t."aggregate_id"), 0) END % 4) = 1`,
		"":  `abs(CASE WHEN "aggregate_id" IS NULL THEN hash_record_extended(ROW("id"), 0) ELSE hash_record_extended(ROW("aggregate_id"), 0) END % 4) = 1`,
	} {
		if got := table.ShardSQL(alias); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
