package relay_test

import (
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/testenv"
)

// TestFirstStartWarnsOnce: of a published table whose rows it would drop, also in a schema that the role may not use, and
// of the stream that it creates.
func TestFirstStartWarnsOnce(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := newRig(t, pg)
	r.exec(`CREATE ROLE relay LOGIN REPLICATION; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO relay; GRANT SELECT, INSERT ON outbox_messages_dlq TO relay;
		GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_journal, outbox_deferred, outbox_progress TO relay; GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO relay;
		CREATE SCHEMA closed; CREATE TABLE closed.events (id bigint); CREATE PUBLICATION walpost FOR TABLE outbox_messages, closed.events WITH (publish = 'insert')`)
	r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay@", 1)
	x := r.start().streaming()
	for _, code := range []string{"publication-other-tables", "stream-one-replica"} {
		if said := x.logs.FilterField(zap.String("code", code)).All(); len(said) != 1 {
			t.Errorf("%s is logged %d times: %v", code, len(said), said)
		} else if code == "publication-other-tables" && !strings.Contains(said[0].Message, "(closed.events)") {
			t.Errorf("the log does not name the table: %s", said[0].Message)
		}
	}
}
