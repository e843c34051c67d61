package drill_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestLayouts: the drill finds out which ids a table takes, and counts with every mark.
func TestLayouts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		env    []string
		schema string // beside what migrate creates
		drill  []string
		config string
	}{
		"append":      {env: []string{"WALPOST_LAYOUT=append"}, drill: []string{"slot-lost"}},
		"mark delete": {env: []string{"WALPOST_MARK=delete"}, drill: []string{"slot-lost"}},
		"poll":        {env: []string{"WALPOST_MODE=poll"}, drill: []string{"relay-killed"}},
		"cloudevents": {env: []string{"WALPOST_FORMAT=cloudevents"}, drill: []string{"slot-lost"}},
		"ids of the application, no order": {
			drill: []string{"slot-lost"},
			schema: `CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid uuid NOT NULL, type text NOT NULL,
				payload jsonb NOT NULL, processed_at timestamptz)`,
			config: "outboxes: [{table: public.outbox, layout: {id: id, aggregate_type: aggregatetype, aggregate_id: aggregateid, " +
				"event_type: type, payload: payload, processed_at: processed_at}}]\n",
		},
		"ids of the application, and a time": {
			drill: []string{"slot-lost", "--rate", "500"},
			schema: `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text NOT NULL, aggregateid text NOT NULL,
				type text NOT NULL, payload jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz)`,
			config: "outboxes: [{table: public.outbox, layout: {id: id, aggregate_type: aggregatetype, aggregate_id: aggregateid, " +
				"event_type: type, payload: payload, occurred_at: at, processed_at: processed_at}}]\n",
		},
		"no aggregates, and a trigger that needs the search_path": {
			drill: []string{"slot-lost"},
			schema: `CREATE TABLE outbox (id bigserial PRIMARY KEY, kind text NOT NULL, payload text NOT NULL, done timestamptz);
				CREATE TABLE counted (n int);
				CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO counted VALUES (1); RETURN NEW; END';
				CREATE TRIGGER count_it BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION count_it()`,
			config: "outboxes: [{table: public.outbox, layout: {id: id, event_type: kind, payload: payload, processed_at: done}}]\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				r := newRig(t, pg)
				if r.env = append(r.env, c.env...); c.config != "" {
					r.must(os.WriteFile(filepath.Join(r.dir, "walpost.yaml"), []byte(c.config), 0o600))
				}
				if c.schema != "" {
					r.exec(c.schema)
				}
				r.walpost("migrate", "up")
				r.allow()
				r.start()
				drill := c.drill
				first := r.relay
				if drill[0] == "relay-killed" {
					drill = append(drill[:1:1], "--pid", fmt.Sprint(r.pid()))
				}
				x := r.begin(append(drill, "--json", "--yes", "--for", "4s")...)
				if drill[0] == "relay-killed" {
					<-first.Done()
					r.start()
				}
				o := r.await(x)
				if o.code != 0 || !o.OK || o.Again == nil || o.CaughtUp == nil || o.Events.Committed != o.Events.Stored || o.Events.Stored < 50 {
					t.Errorf("exit code %d, report %+v", o.code, o.Report)
				}
			})
		})
	}
}
