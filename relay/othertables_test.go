package relay_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestOtherTables: a start warns, once, of a published table whose rows it would drop. A table in a schema that the role
// may not use is named, too.
func TestOtherTables(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := newRig(t, pg)
	r.exec(`CREATE ROLE relay LOGIN REPLICATION; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO relay; GRANT SELECT, INSERT ON outbox_messages_dlq TO relay;
		GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_journal, outbox_deferred, outbox_progress TO relay; GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO relay;
		CREATE SCHEMA closed; CREATE TABLE closed.events (id bigint); CREATE PUBLICATION walpost FOR TABLE outbox_messages, closed.events WITH (publish = 'insert')`)
	r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay@", 1)
	x := r.start().streaming()
	var warned int
	for _, e := range x.logs.All() {
		if e.ContextMap()["code"] == "publication-other-tables" && strings.Contains(e.Message, "(closed.events)") {
			warned++
		}
	}
	if warned != 1 {
		t.Errorf("the log warns %d times", warned)
	}
}
