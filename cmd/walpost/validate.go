package main

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// validate reports everything that is wrong, each as "key: what", with where the value came from for the keys
// in origin, and nil where all is well. It opens no file and no connection: a configuration can be checked
// where its secrets are not.
func (c *Config) validate(origin map[string]string) error {
	var all problems
	report := func(name string, err error) {
		if err != nil {
			all = append(all, problem(name, origin[name], err))
		}
	}
	for _, k := range c.keys() {
		report(k.name, k.Check())
	}
	if p := &c.Postgres; p.URL != "" && p.URLFile != "" {
		report("postgres.url_file", hint.Errorf("keep one of them",
			"postgres.url is set, too: they are alternatives"))
	}
	c.checkOutboxes(report)
	shard, err := outbox.ParseShard(c.Shard)
	if err == nil && !shard.All() && c.Postgres.Slot == defaultSlot {
		report("shard", hint.Errorf(fmt.Sprintf("set postgres.slot, postgres.publication, nats.stream and "+
			"nats.subject for shard %s alone, as in walpost_%[2]d, walpost_%[2]d, EVENTS_%[2]d and "+
			"events.%[2]d.{event_type}", shard, shard.Index),
			"relays with the same slot stand by for each other, and %q is the default", defaultSlot))
	}
	c.checkCredentials(report)
	b := jetstream.Batching(c.Publish.Batch)
	if c.NATS.Shared && (b == jetstream.BatchFast || b == jetstream.BatchAtomic) {
		report("publish.batch", hint.Errorf("leave it out, or give the relay a stream of its own",
			"%s in a shared stream, where no expected sequence proves a batch", b))
	}
	if n := c.Postgres.MaxRetainedWAL; n > 0 && n < leastRetainedWAL {
		report("postgres.max_retained_wal", hint.Errorf("write a unit, as in 10GB, or 0 for no budget",
			"%s is less than %s, and a slot always keeps some", formatSize(n), formatSize(leastRetainedWAL)))
	}
	if r := c.Retention; r.DropAfter > 0 && r.DropAfter < r.ArchiveAfter {
		report("retention.drop_after", fmt.Errorf("%s is less than retention.archive_after (%s)",
			formatDuration(c.Retention.DropAfter), formatDuration(c.Retention.ArchiveAfter)))
	}
	if h := &c.HTTP; h.UI && h.Listen == "" {
		report("http.ui", hint.Errorf("set http.listen, such as 127.0.0.1:9464", "http.listen is off"))
	}
	if h := &c.HTTP; h.TokenFile != "" && !h.UI {
		report("http.token_file", hint.Errorf("set http.ui, or leave it out", "http.ui is off"))
	}
	if len(all) == 0 {
		return nil
	}
	return &usageError{all}
}

// leastRetainedWAL is four of the segments that PostgreSQL writes WAL in by default.
const leastRetainedWAL = 64 << 20

func problem(name, origin string, err error) error {
	if origin == "" {
		return fmt.Errorf("%s: %w", name, err)
	}
	return fmt.Errorf("%s (%s): %w", name, origin, err)
}

func (c *Config) checkOutboxes(report func(string, error)) {
	if len(c.Outboxes) == 0 {
		report("outboxes", hint.Errorf("leave the key out for public.outbox_messages", "the list is empty"))
	}
	seen, names := map[string]bool{}, map[string]bool{}
	for i, o := range c.Outboxes {
		if names[o.Name] && o.Name != "" {
			report(fmt.Sprintf("outboxes[%d].name", i), hint.Errorf("give each outbox a name of its own",
				"%q is the name of another outbox", o.Name))
		}
		names[o.Name] = true
		schema, name, err := outbox.ParseTable(o.Table)
		if err != nil {
			continue // reported with its key
		}
		if full := schema + "." + name; seen[full] {
			report(fmt.Sprintf("outboxes[%d].table", i),
				hint.Errorf("leave one of them out: a row has one layout and one mark",
					"%q is listed twice", full))
		} else {
			seen[full] = true
		}
		layout, err := o.layout()
		if err != nil {
			continue
		}
		if o.Mark.Name == string(outbox.MarkUpdate) && len(layout.MarkFields()) == 0 {
			report(fmt.Sprintf("outboxes[%d].mark", i), hint.Errorf(
				"name a status, as in {set: {status: 2}}, or set mark: delete",
				"update needs a processed_at column, and layout %s has none", layout.Name))
		}
		c.checkStatus(i, &layout, report)
		c.checkHeaders(i, &layout, report)
	}
}

// checkStatus reports a status that the layout has no use for, or a column with two uses.
func (c *Config) checkStatus(i int, layout *outbox.Layout, report func(string, error)) {
	key := fmt.Sprintf("outboxes[%d].mark", i)
	if layout.States[outbox.Failed]+layout.States[outbox.Dead] != "" && !layout.Records() {
		report(key, hint.Errorf(
			"map attempts, and available_at or last_error, in outboxes[].layout, "+
				"or leave failed and dead out",
			"a row that has failed is tried again, and layout %s does not count attempts", layout.Name))
	}
	for f := outbox.ID; f < outbox.Status; f++ {
		isHeader := f >= outbox.FirstHeader && f <= outbox.LastHeader // see checkHeaders
		if layout.Has(f) && !isHeader && layout.Columns[f] == layout.Columns[outbox.Status] {
			report(key, hint.Errorf("name another column", "column %q is mapped to %s", layout.Columns[f], f))
		}
	}
}

// checkHeaders reports columns that the relay changes: the event would be another one then.
func (c *Config) checkHeaders(i int, layout *outbox.Layout, report func(string, error)) {
	for _, f := range append(layout.MarkFields(), layout.RecordFields()...) {
		for h := outbox.FirstHeader; h <= outbox.LastHeader; h++ {
			if layout.Has(h) && layout.Columns[h] == layout.Columns[f] {
				report(fmt.Sprintf("outboxes[%d].headers", i), hint.Errorf("leave it out",
					"column %q is one that a relay writes: it is no part of the event", layout.Columns[h]))
				return
			}
		}
	}
}

func (c *Config) checkCredentials(report func(string, error)) {
	n := &c.NATS
	var used []string
	for _, way := range []struct{ key, value string }{
		{"creds", n.Creds}, {"nkey", n.NKey}, {"user", n.User}, {"token_file", n.TokenFile},
	} {
		if way.value != "" {
			used = append(used, way.key)
		}
	}
	if len(used) > 1 {
		report("nats."+used[1], hint.Errorf("keep one of them",
			"%s are alternatives", strings.Join(used, " and ")))
	}
	if n.PasswordFile != "" && n.User == "" {
		report("nats.password_file", errors.New("it needs nats.user"))
	}
	if n.User != "" && n.PasswordFile == "" {
		report("nats.user", errors.New("it needs nats.password_file"))
	}
	for server := range strings.SplitSeq(n.URL, ",") {
		if strings.Contains(server, "@") && len(used) > 0 {
			report("nats.url", hint.Errorf("keep one of them",
				"it has credentials, and nats.%s is set: they are alternatives", used[0]))
			break
		}
	}
	if (n.TLS.Cert == "") != (n.TLS.Key == "") {
		report("nats.tls", errors.New("cert and key need each other"))
	}
}

func checkSlot(s string) error {
	if !slotForm.MatchString(s) {
		return fmt.Errorf("%q is not a slot name, want 1 to 59 of a-z, 0-9 and _", s)
	}
	if strings.HasSuffix(s, "_new") {
		return hint.Errorf("choose another name",
			"%q would be taken for the recreation of slot %q", s, strings.TrimSuffix(s, "_new"))
	}
	return nil
}

func checkPublication(s string) error {
	if s == "" || len(s) > 63 || strings.ContainsRune(s, 0) {
		return fmt.Errorf("%q is not a publication name, want 1 to 63 bytes", s)
	}
	return nil
}

func checkName(s string) error {
	if len(s) > 63 || strings.ContainsRune(s, 0) {
		return fmt.Errorf("%q is not a name, want at most 63 bytes", s)
	}
	return nil
}

// checkSource leaves the judgement to the package that sends it.
func checkSource(s string) error {
	if s == "" {
		return nil
	}
	_, err := publish.NewEnvelope(publish.EnvelopeConfig{Source: s})
	return err
}

// mostOutboxName is the length of the longest name that "schema.table" can be.
const mostOutboxName = 127

func checkOutboxName(s string) error {
	if len(s) > mostOutboxName || strings.ContainsFunc(s, unicode.IsControl) {
		return hint.Errorf(fmt.Sprintf("at most %d bytes, as in orders", mostOutboxName),
			"%q is no name of an outbox", s)
	}
	return nil
}

func checkTable(s string) error {
	_, _, err := outbox.ParseTable(s)
	return err
}

func checkNATSURL(s string) error {
	_, err := jetstream.ParseURLs(s)
	return err
}

func checkPort(port string) error {
	if port == "" {
		return nil
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("port %q is not 0 to 65535", port)
	}
	return nil
}

func checkDomain(s string) error {
	if strings.ContainsAny(s, ". *>/\\\t\r\n") {
		return fmt.Errorf("%q is not a JetStream domain, want one token without . * > / \\ and spaces", s)
	}
	return nil
}

func checkInboxPrefix(s string) error {
	bad := strings.ContainsAny(s, " *>\t\r\n") || slices.Contains(strings.Split(s, "."), "")
	if s != "" && bad {
		return fmt.Errorf("%q is not a subject prefix, want tokens joined by dots, without * and >", s)
	}
	return nil
}

func checkStream(s string) error {
	if s == "" || len(s) > 255 || strings.ContainsAny(s, " .*>/\\\t\r\n\x00") {
		return fmt.Errorf("%q is not a stream name, "+
			"want 1 to 255 characters without spaces and any of . * > / \\", s)
	}
	return nil
}

func checkSubject(s string) error {
	_, err := publish.NewTemplate(s)
	return err
}

func checkListen(s string) error {
	if s == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(s)
	if err == nil && port == "" {
		err = errors.New("missing port")
	}
	if err == nil {
		err = checkPort(port)
	}
	if err != nil {
		return hint.Errorf("want host:port, as in 127.0.0.1:9464 or :9464 for every interface, "+
			"or nothing for off",
			"%q: %w", s, err)
	}
	return nil
}
