package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestStandbyServesSomethingElse: a relay that stands by says so where the holder of the lock does not deliver
// what it would, and stays ready. It says nothing of one that does, nor of one that does not tell.
func TestStandbyServesSomethingElse(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	active := r.start().streaming()
	same := r.start()
	standsBy := func(x *running) {
		t.Helper()
		eventually(t, "it stands by", func() bool { return x.Status().State == "standby" })
	}
	standsBy(same)

	others := map[string]*running{}
	second := *r
	second.cfg.Outboxes = append([]*outbox.Table{}, r.cfg.Outboxes...)
	added := *r.cfg.Outboxes[0]
	added.Name = "outbox_second"
	r.exec(`CREATE TABLE outbox_second (LIKE outbox_messages INCLUDING ALL); ALTER PUBLICATION walpost ADD TABLE outbox_second`)
	second.cfg.Outboxes = append(second.cfg.Outboxes, &added)
	others["tables"] = second.start()
	moved := *r
	moved.cfg.Stream.Name, moved.cfg.Subject = "OTHER", "other.{event_type}"
	others["stream"] = moved.start()
	for name, x := range others {
		f := x.alarmed("slot_shared")
		if !strings.Contains(fmt.Sprint(f["hint"]), "postgres.slot") {
			t.Errorf("%s: the alarm says %v", name, f)
		}
		standsBy(x)
		if x.Ready() != nil || !strings.Contains(x.Status().LastError, r.cfg.Slot) {
			t.Errorf("%s: ready: %v, status: %+v", name, x.Ready(), x.Status())
		}
		if name != "tables" {
			x.halt()
		}
	}
	found := second.examine()
	if !strings.Contains(found, "warn slot-shared") {
		t.Errorf("doctor finds %s", found)
	}
	if found := r.examine(); strings.Contains(found, "slot-shared") {
		t.Errorf("doctor of the same configuration finds %s", found)
	}
	once := second
	once.cfg.Once = true
	o := once.start()
	o.ends()
	if o.err == nil || !strings.Contains(hint.Of(o.err), "postgres.slot") {
		t.Errorf("a relay that runs once ends with %v", o.err)
	}
	same.quiet("slot_shared")
	active.quiet("slot_shared")

	// The one that has waited in vain gets the lock, and the other one does not deliver all that it would.
	same.halt()
	active.halt()
	x := others["tables"].streaming()
	x.over("slot_shared")
	r.start().alarmed("slot_shared")
	x.halt()
}

// TestOlderHolderTellsNothing: a relay of an older version has only the lock. It may be another database's.
func TestOlderHolderTellsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	other := newRigWith(t, r.pg, r.nats)
	other.cfg.Slot = r.cfg.Slot
	old := r.conn()
	r.must(run(t.Context(), old, `SELECT pg_advisory_lock(hashtextextended('walpost/`+r.cfg.Slot+`', 0))`))
	x := r.start()
	eventually(t, "it stands by", func() bool { return x.Status().State == "standby" })
	for of, found := range map[string]string{"this": r.examine(), "another": other.examine()} {
		if strings.Contains(found, "slot-shared") {
			t.Errorf("doctor of %s database finds %s", of, found)
		}
	}
	x.quiet("slot_shared")
	const key = 0x77616c70
	r.must(run(t.Context(), old, fmt.Sprintf(`SELECT pg_advisory_lock_shared(%d, 1)`, key)))
	x.alarmed("slot_shared")
	r.must(run(t.Context(), old, fmt.Sprintf(`SELECT pg_advisory_unlock_shared(%d, 1)`, key)))
	x.over("slot_shared")
	if s := x.Status(); s.State != "standby" || s.LastError != "" {
		t.Errorf("the status is %+v", s)
	}
}

// TestServing: what a relay serves does not depend on the order of its outboxes.
func TestServing(t *testing.T) {
	one, two := outbox.Table{Schema: "public", Name: "one"}, outbox.Table{Schema: "public", Name: "two"}
	where, shard := one, one
	where.Where, shard.Shard = "true", outbox.Shard{Index: 1, Of: 2}
	serving := func(stream, domain string, tables ...*outbox.Table) string {
		return table.Serving(tables, stream, domain)
	}
	if serving("S", "", &one, &two) != serving("S", "", &two, &one) {
		t.Error("the order of the outboxes matters")
	}
	seen := map[string]bool{}
	for _, s := range []string{
		serving("S", "", &one), serving("S", "", &two), serving("S", "", &one, &two), serving("T", "", &one),
		serving("S", "hub", &one), serving("S", "", &where), serving("S", "", &shard),
	} {
		if seen[s] {
			t.Errorf("several serve %s", s)
		}
		seen[s] = true
	}
}

// examine is what doctor finds, "level code" in a line each.
func (r *rig) examine() string {
	r.t.Helper()
	rel, err := relay.New(r.cfg, zap.NewNop(), prometheus.NewRegistry())
	r.must(err)
	var all []string
	for _, f := range rel.Examine(r.t.Context()) {
		all = append(all, string(f.Level)+" "+f.Code)
	}
	return strings.Join(all, "\n")
}
