package migrations

import (
	"slices"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

// Group names the tables that belong together in a database. The relay's, a consumer's and those of
// idempotency keys may lie in three databases.
type Group string

const (
	// Relay is the outbox, its dead letters, its archive, and the requests for replays.
	Relay Group = "relay"
	// Consumer is what package consume keeps in the database in which its handlers work.
	Consumer Group = "consumer"
	// Idempotency is the keys of HTTP requests.
	Idempotency Group = "idempotency"
)

// groups lists the groups with the tables that an application's role reads and writes. The relay's grants
// depend on its outboxes.
var groups = []struct {
	name   Group
	tables []string
}{
	{name: Relay},
	{name: Consumer, tables: []string{
		"consumer_offsets", "consumer_definitions", "consumer_seen", "consumer_parked",
	}},
	{name: Idempotency, tables: []string{"idempotency_keys"}},
}

// Groups lists the groups in a fixed order.
func Groups() (all []Group) {
	for _, g := range groups {
		all = append(all, g.name)
	}
	return all
}

// ParseGroup finds a group by its name.
func ParseGroup(name string) (Group, error) {
	var names []string
	for _, g := range Groups() {
		if string(g) == name {
			return g, nil
		}
		names = append(names, string(g))
	}
	return "", hint.Errorf("the groups are "+strings.Join(names, ", "),
		"find group %q of tables: no such group", name)
}

// Tables lists the tables that an application's role reads and writes. There are none of [Relay].
func (g Group) Tables() []string {
	for _, group := range groups {
		if group.name == g {
			return slices.Clone(group.tables)
		}
	}
	return nil
}
