package main

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/telemetry"
	"github.com/walpost/walpost/outbox"
)

// key is one line of the configuration's table. Defaults, flags, environment variables, the file's keys, the
// checks, the example and the output of `config check` are all made from it.
type key struct {
	name    string // "nats.tls.ca"; of an outbox "outboxes[0].table"
	env     string
	initial string // the default, as Set takes it
	value
	help string
}

// flag is the command line's name: WALPOST_POSTGRES_URL is --postgres-url.
func (k key) flag() string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(k.env, "WALPOST_")), "_", "-")
}

// keys is the table, bound to the fields of c, in the order of the example.
func (c *Config) keys() []key {
	table := c.postgresKeys()
	table = append(table, key{
		"source", "WALPOST_SOURCE", "",
		stringValue{p: &c.Source, check: checkSource},
		"The namespace of the message ids (Nats-Msg-Id) and the ce-source: " +
			"at most 256 printable ASCII characters without spaces and quotes. " +
			"Empty is <system id>/<database>. Never change it while rows are pending: " +
			"they would be new events.",
	})
	table = append(table, key{
		"shard", "WALPOST_SHARD", "",
		stringValue{p: &c.Shard, check: func(s string) error { _, err := outbox.ParseShard(s); return err }},
		fmt.Sprintf("The part of the aggregates that is this relay's, as in 1/4, the first of four "+
			"(at most %d), by a hash of aggregate_id. Empty is all of them. Each shard needs a slot, "+
			"a publication and a stream of its own, and PostgreSQL 15 or newer.", outbox.MaxShards),
	})
	for i := range c.Outboxes {
		table = append(table, c.outboxKeys(i)...)
	}
	table = append(table, c.natsKeys()...)
	table = append(table, c.publishKeys()...)
	table = append(table, c.fallbackKeys()...)
	table = append(table, c.catalogKeys()...)
	return append(table, c.surroundingKeys()...)
}

func (c *Config) postgresKeys() []key {
	p := &c.Postgres
	return []key{
		{
			"postgres.url", "WALPOST_POSTGRES_URL", "postgres://localhost:5432/postgres",
			stringValue{p: &p.URL, check: pg.CheckURL, redact: redactPostgres},
			"The database with the outbox, as a URL or as libpq's keyword/value string. " +
				"It must lead to the server itself, not to a pooler. " +
				"Where it is not set, the PG* variables of libpq are used " +
				"if one of PGHOST, PGPORT, PGDATABASE or PGSERVICE is.",
		},
		{
			"postgres.url_file", "WALPOST_POSTGRES_URL_FILE", "",
			stringValue{p: &p.URLFile},
			"A file with the URL, in place of url, read at every connection.",
		},
		{
			"postgres.password_file", "WALPOST_POSTGRES_PASSWORD_FILE", "",
			stringValue{p: &p.PasswordFile},
			"A file with the password, read at every connection. It goes before any other password, " +
				"such as one in the URL. Where a flag or variable gives a URL with a password, or with " +
				"another user, a password_file of a weaker source is left out.",
		},
		{
			"postgres.slot", "WALPOST_SLOT", defaultSlot,
			stringValue{p: &p.Slot, check: checkSlot},
			"The logical replication slot: 1 to 59 of a-z, 0-9 and _, not ending in _new " +
				"(that one belongs to the slot's recreation). " +
				"Relays with the same slot stand by for each other.",
		},
		{
			"postgres.publication", "WALPOST_PUBLICATION", "walpost",
			stringValue{p: &p.Publication, check: checkPublication},
			"The publication that the slot reads: 1 to 63 bytes. `walpost migrate up` creates it.",
		},
		{
			"postgres.max_retained_wal", "WALPOST_MAX_RETAINED_WAL", "10GB",
			sizeValue{&p.MaxRetainedWAL, 0, 100e12},
			"How much WAL the slot may hold back on the server, in bytes or with a unit " +
				"(GB, GiB, ...), at least 64 MiB. Past it the slot is given up and recreated, " +
				"and the table delivers what was missed. 0 is no budget.",
		},
		{
			"postgres.initial", "WALPOST_INITIAL", "",
			choiceValue{&p.Initial, []string{"", "pending", "none"}},
			"What a first start does with the rows that are already pending: " +
				"publish them (pending) or mark them as processed (none). " +
				"Empty publishes up to 100,000 rows and asks when there are more.",
		},
		{
			"postgres.schema", "WALPOST_SCHEMA", "",
			stringValue{p: &p.Schema, check: checkName},
			"The schema of walpost's own tables: where `walpost migrate up` makes them, and where alone " +
				"they are looked for. Empty is the first outbox's.",
		},
		{
			"postgres.owner", "WALPOST_OWNER", "",
			stringValue{p: &p.Owner, check: checkName},
			"A further role whose tables are walpost's own. Trusted without it are the session's role, " +
				"superusers, and the owners of the database, of the schema and of the outboxes: " +
				"any other role's table is refused. " +
				"A superuser's session trusts superusers and this role only.",
		},
	}
}

func (c *Config) outboxKeys(i int) []key {
	o := &c.Outboxes[i]
	env := func(name string) string {
		if i > 0 {
			return "" // only the first outbox can be reached from outside of the file
		}
		return name
	}
	at := fmt.Sprintf("outboxes[%d].", i)
	return []key{
		{
			at + "table", env("WALPOST_TABLE"), "public.outbox_messages",
			stringValue{p: &o.Table, check: checkTable},
			"An outbox table, with its schema. Several entries may follow; " +
				"the environment and the flags speak of the first.",
		},
		{
			at + "name", env("WALPOST_OUTBOX_NAME"), "",
			stringValue{p: &o.Name, check: checkOutboxName},
			"The outbox's name in message ids, dead letters and the journal. It is the table's name at the " +
				"first start, and stays so when the table is renamed.",
		},
		{
			at + "layout", env("WALPOST_LAYOUT"), "canonical",
			layoutValue{&o.Layout},
			"What its columns are called: a known layout, or a map from field to column, " +
				"as in {id: id, event_type: kind, payload: body}; " +
				"in the environment id=id,event_type=kind,payload=body. " +
				"The fields: " + strings.Join(outbox.FieldNames(), ", ") +
				"; id, event_type and payload are required. With append, table and mark are " +
				"public.outbox_events and journal where nothing else is said.",
		},
		{
			at + "mark", env("WALPOST_MARK"), "update",
			markValue{&o.Mark},
			"How a stored row is taken out: update sets processed_at, and the status where the layout " +
				"has one; delete deletes it; journal leaves it as it is, in a table that is append-only, " +
				"and writes its id into outbox_journal. " +
				"{set: {status: 2}} names a status and its value for delivered rows; failed and dead " +
				"beside set are those of rows that have failed, as in " +
				"{set: {status: 2}, failed: 3, dead: 4}; " +
				"in the environment status=2,failed=3,dead=4.",
		},
		{
			at + "where", env("WALPOST_WHERE"), "",
			stringValue{p: &o.Where},
			"An SQL condition on the row, as in status <> 4: rows that do not fit are not events. " +
				"The publication filters by it, which takes PostgreSQL 15 or newer; " +
				"with mode poll any version does.",
		},
		{
			at + "headers", env("WALPOST_HEADERS"), "",
			headersValue{&o.Headers},
			fmt.Sprintf("Columns that become headers, at most %d: a list, or a map from column to header. "+
				"Without a name the header is %s<column>. A column of type json or jsonb becomes a header "+
				"for each key, and its name is the prefix of theirs (%[2]s). In the environment "+
				"message_id,headers=X-. Empty is what the layout has; [] is none.",
				outbox.MaxHeaders, outbox.HeaderPrefix),
		},
	}
}

func (c *Config) natsKeys() []key {
	n := &c.NATS
	return append(c.credentialKeys(), []key{
		{
			"nats.domain", "WALPOST_NATS_DOMAIN", "",
			stringValue{p: &n.Domain, check: checkDomain},
			"The JetStream domain, where the stream is not in the connected server's own.",
		},
		{
			"nats.inbox_prefix", "WALPOST_NATS_INBOX_PREFIX", "",
			stringValue{p: &n.InboxPrefix, check: checkInboxPrefix},
			"The subject prefix under which acknowledgements come back. Empty is _WALPOST. and the slot's " +
				"name: no other user should be permitted to publish or subscribe there.",
		},
		{
			"nats.shared", "WALPOST_SHARED", "false",
			boolValue{&n.Shared},
			"Whether others write to the stream too. Then only message ids and the " +
				"stream's duplicate window stand against duplicates.",
		},
		{
			"nats.accept_weak_stream", "WALPOST_ACCEPT_WEAK_STREAM", "false",
			boolValue{&n.AcceptWeakStream},
			"Whether a stream is accepted whose newest messages may vanish " +
				"(workqueue or interest retention, limits per subject, TTL).",
		},
		{
			"nats.stream", "WALPOST_STREAM", "EVENTS",
			stringValue{p: &n.Stream, check: checkStream},
			"The JetStream stream: 1 to 255 characters without spaces and any of . * > / \\.",
		},
		{
			"nats.create_stream", "WALPOST_CREATE_STREAM", "true",
			boolValue{&n.CreateStream},
			"Whether to create the stream at process start where it does not exist and nothing can " +
				"have been stored: no row is marked, and with mark delete there is no slot. " +
				"An existing one is checked, never changed.",
		},
		{
			"nats.subject", "WALPOST_SUBJECT", "events.{event_type}",
			stringValue{p: &n.Subject, check: checkSubject},
			"The subject of each event: literal tokens and {event_type} {tenant_id} {aggregate_type} " +
				"{aggregate_id} {event_version}, joined by dots. {partition/N} may be the first token.",
		},
		{
			"nats.format", "WALPOST_FORMAT", "binary",
			choiceValue{&n.Format, []string{"binary", "cloudevents"}},
			"binary: the payload is the body, the attributes are CloudEvents headers. " +
				"cloudevents: a JSON envelope around both.",
		},
	}...)
}

func (c *Config) credentialKeys() []key {
	n := &c.NATS
	file := func(name, env string, p *string, help string) key {
		return key{name, env, "", stringValue{p: p}, help}
	}
	return []key{
		{
			"nats.url", "WALPOST_NATS_URL", "nats://localhost:4222",
			stringValue{p: &n.URL, check: checkNATSURL, redact: redactNATS},
			"The NATS server, or several of one cluster, comma-separated.",
		},
		file("nats.creds", "WALPOST_NATS_CREDS", &n.Creds,
			"A credentials file (JWT and seed). At most one of creds, nkey, user and token_file."),
		file("nats.nkey", "WALPOST_NATS_NKEY", &n.NKey,
			"A file with an nkey seed."),
		file("nats.user", "WALPOST_NATS_USER", &n.User,
			"A user name; its password stands in password_file."),
		file("nats.password_file", "WALPOST_NATS_PASSWORD_FILE", &n.PasswordFile,
			"A file with the user's password, read at every connection."),
		file("nats.token_file", "WALPOST_NATS_TOKEN_FILE", &n.TokenFile,
			"A file with a token, read at every connection."),
		file("nats.tls.ca", "WALPOST_NATS_TLS_CA", &n.TLS.CA,
			"A PEM file of authorities to trust instead of the system's."),
		file("nats.tls.cert", "WALPOST_NATS_TLS_CERT", &n.TLS.Cert,
			"A PEM file with the client's certificate; it needs tls.key."),
		file("nats.tls.key", "WALPOST_NATS_TLS_KEY", &n.TLS.Key,
			"A PEM file with the client certificate's key."),
		{
			"nats.tls.handshake_first", "WALPOST_NATS_TLS_FIRST", "false",
			boolValue{&n.TLS.HandshakeFirst},
			"Begin with the TLS handshake, before the server's greeting: " +
				"for servers whose tls block has handshake_first.",
		},
	}
}

func (c *Config) publishKeys() []key {
	p := &c.Publish
	return []key{
		{
			"publish.window", "WALPOST_WINDOW", "4096",
			intValue{&p.Window, 1, jetstream.U},
			"How many messages may be on their way to JetStream without an acknowledgement. " +
				"It bounds memory, together with window_bytes.",
		},
		{
			"publish.window_bytes", "WALPOST_WINDOW_BYTES", "32MiB",
			sizeValue{&p.WindowBytes, 64 << 10, 1 << 30},
			"The same in bytes. One message that is larger than all of it goes out alone.",
		},
		{
			"publish.batch", "WALPOST_BATCH", "auto",
			choiceValue{&p.Batch, []string{"auto", "single", "atomic", "fast"}},
			"How messages are handed to JetStream: one by one, in atomic batches, by fast ingest, " +
				"or whichever the stream allows.",
		},
		{
			"mode", "WALPOST_MODE", "auto",
			choiceValue{&c.Mode, []string{"auto", "stream", "poll"}},
			"stream reads the WAL and fails where it cannot; poll reads the table only; " +
				"auto streams where wal_level is logical and the role may replicate, and polls elsewhere.",
		},
	}
}

func (c *Config) fallbackKeys() []key {
	f := &c.Fallback
	return []key{
		{
			"fallback.interval", "WALPOST_FALLBACK_INTERVAL", "30s",
			durationValue{&f.Interval, 100 * time.Millisecond, time.Hour},
			"How often the table is searched for rows that the WAL did not deliver, beside the WAL.",
		},
		{
			"fallback.batch", "WALPOST_FALLBACK_BATCH", "100",
			intValue{&f.Batch, 1, jetstream.U},
			"How many rows one statement of the poller reads from the table.",
		},
		{
			"fallback.delay_threshold", "WALPOST_FALLBACK_DELAY_THRESHOLD", "1s",
			durationValue{&f.DelayThreshold, 0, time.Hour},
			"A row is delayed when available_at lies further than this after its commit. " +
				"It forgives the producers' clocks.",
		},
		{
			"fallback.max_attempts", "WALPOST_FALLBACK_MAX_ATTEMPTS", "10",
			intValue{&f.MaxAttempts, 0, 1000},
			"After how many failed attempts of its own a row becomes a dead letter with the next. " +
				"Outages are never attempts.",
		},
		{
			"fallback.backoff", "WALPOST_FALLBACK_BACKOFF", "30s",
			durationValue{&f.Backoff, time.Millisecond, 24 * time.Hour},
			"How long a row waits after its first failure; after the n-th it waits n times as long, " +
				"from the eighth on eight times. Shorter than the default is for tests.",
		},
		{
			"fallback.on_poison", "WALPOST_FALLBACK_ON_POISON", "hold",
			choiceValue{&f.OnPoison, []string{"hold", "skip"}},
			"What a failing row does to the later rows of its aggregate: " +
				"hold them back, which keeps the order, or let them pass (skip).",
		},
	}
}

func (c *Config) surroundingKeys() []key {
	const decade = 10 * 365 * 24 * time.Hour
	r := &c.Retention
	return []key{
		{
			"retention.archive_after", "WALPOST_RETENTION_ARCHIVE_AFTER", "168h",
			optionalDuration{durationValue{&r.ArchiveAfter, time.Minute, decade}},
			"How long after it was processed a row moves to the archive; 0s is never. " +
				"Undelivered rows never do. " +
				"What JetStream has lost is noticed among the rows that are still in the outbox.",
		},
		{
			"retention.delete_after", "WALPOST_RETENTION_DELETE_AFTER", "0s",
			optionalDuration{durationValue{&r.DeleteAfter, time.Minute, decade}},
			"How long after it was processed a row is deleted from an outbox that has no archive, " +
				"as those of other layouts than canonical; 0s is never.",
		},
		{
			"retention.excluded_after", "WALPOST_RETENTION_EXCLUDED_AFTER", "0s",
			optionalDuration{durationValue{&r.ExcludedAfter, time.Minute, decade}},
			"How long after its occurred_at a row that outboxes[].where excludes goes with its partition " +
				"of ids, if no relay has it pending; 0s is never: it keeps the partition.",
		},
		{
			"retention.drop_after", "WALPOST_RETENTION_DROP_AFTER", "2160h",
			optionalDuration{durationValue{&r.DropAfter, time.Minute, decade}},
			"How long after its end, and after its last row was processed, " +
				"a month of the archive is dropped; at least archive_after; 0s is never.",
		},
		{
			"retention.interval", "WALPOST_RETENTION_INTERVAL", "1h",
			optionalDuration{durationValue{&r.Interval, time.Second, 24 * time.Hour}},
			"How often that is done; 0s is never.",
		},
		{
			"http.listen", "WALPOST_HTTP_LISTEN", "127.0.0.1:9464",
			stringValue{p: &c.HTTP.Listen, check: checkListen},
			"The address of /metrics, /healthz, /readyz and /status, without authentication: " +
				"keep it inside. Empty is off.",
		},
		{
			"http.ui", "WALPOST_HTTP_UI", "false",
			boolValue{&c.HTTP.UI},
			"Serve the console at /ui/ of http.listen. Without http.token_file everybody who reaches the " +
				"address can read it, except payloads, and nobody can change anything.",
		},
		{
			"http.token_file", "WALPOST_HTTP_TOKEN_FILE", "",
			stringValue{p: &c.HTTP.TokenFile},
			"A file with the token that the console asks for, at least 16 characters, read at the start. " +
				"Who has it may read payloads and make changes.",
		},
		{
			"otlp.endpoint", "WALPOST_OTLP_ENDPOINT", "",
			stringValue{p: &c.OTLP.Endpoint, check: telemetry.CheckEndpoint},
			"The OpenTelemetry collector that gets traces and metrics, by OTLP over HTTP, as in " +
				"http://localhost:4318. Empty is off. OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES " +
				"and OTEL_SERVICE_NAME count, too.",
		},
		{
			"otlp.trace_ratio", "WALPOST_OTLP_TRACE_RATIO", "0.01",
			ratioValue{&c.OTLP.TraceRatio},
			"The part of the traces that the relay adds spans to, by the trace's id: of rows whose " +
				"traceparent is sampled, and of those without one. 0 is none.",
		},
		{
			"otlp.metrics_interval", "WALPOST_OTLP_METRICS_INTERVAL", "1m",
			optionalDuration{durationValue{&c.OTLP.MetricsInterval, time.Second, time.Hour}},
			"How often the metrics are sent; 0s is never. /metrics has them all the same.",
		},
		{
			"log.level", "WALPOST_LOG_LEVEL", "info",
			choiceValue{&c.Log.Level, []string{"debug", "info", "warn", "error"}},
			"The least severe lines that are written, to standard error.",
		},
		{
			"log.format", "WALPOST_LOG_FORMAT", "auto",
			choiceValue{&c.Log.Format, []string{"auto", "console", "json"}},
			"auto is console on a terminal and json elsewhere.",
		},
	}
}

// emptyMeans lists the keys for which an empty environment variable says something. For all others it counts
// as not set, as it comes from `WALPOST_X=${X}` in a compose file.
var emptyMeans = map[string]bool{"http.listen": true}

var slotForm = regexp.MustCompile(`^[a-z0-9_]{1,59}$`)
