package badinput

import (
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// brokerCases lead to the wrong NATS server, or to the wrong account.
func brokerCases(s *site) []badStart {
	plain := testenv.NewNATS(s.t, testenv.NATSOptions{Config: "jetstream: disabled"})
	s.called(hostPort(plain.URL()), "PLAIN")
	_, err := s.jetStream("full").CreateStream(s.t.Context(), jetstream.StreamConfig{Name: "ONLY"})
	s.must(err)
	anonymous := map[string]string{"WALPOST_NATS_URL": s.nats.URL()}
	with := func(extra ...string) map[string]string {
		env := map[string]string{"WALPOST_NATS_URL": s.nats.URL()}
		for i := 0; i < len(extra); i += 2 {
			env[extra[i]] = extra[i+1]
		}
		return env
	}
	return []badStart{
		{name: "noinfo", env: with("WALPOST_NATS_URL", s.natsURL("noinfo"))},
		{name: "noinbox", env: with("WALPOST_NATS_URL", s.natsURL("noinbox"))},
		{name: "nocreate", env: with("WALPOST_NATS_URL", s.natsURL("nocreate"))},
		{name: "no_broker", waits: true, env: with("WALPOST_NATS_URL", "nats://app:hunter2@127.0.0.1:1")},
		{name: "server_as_broker", waits: true, env: with("WALPOST_NATS_URL", "nats://"+hostPort(s.pg.URL("")))},
		{name: "anonymous", env: anonymous},
		{name: "wrong_secret", env: with("WALPOST_NATS_USER", "app", "WALPOST_NATS_PASSWORD_FILE", s.file("password", "hunter2\n"))},
		{name: "no_password_file", env: with("WALPOST_NATS_USER", "app", "WALPOST_NATS_PASSWORD_FILE", "/nowhere/password")},
		{name: "bad_creds", env: with("WALPOST_NATS_CREDS", s.file("app.creds", "app:secret\n"))},
		{name: "no_creds", env: with("WALPOST_NATS_CREDS", "/nowhere/app.creds")},
		{name: "bad_nkey", env: with("WALPOST_NATS_NKEY", s.file("app.nk", "secret\n"))},
		{name: "bad_ca", env: with("WALPOST_NATS_TLS_CA", s.file("ca.pem", "none\n"))},
		{name: "no_tls", env: with("WALPOST_NATS_URL", "tls://app:secret@"+hostPort(s.nats.URL()))},
		{name: "jetstream_disabled", waits: true, env: with("WALPOST_NATS_URL", plain.URL())},
		{name: "account_without_jetstream", env: with("WALPOST_NATS_URL", s.natsURL("plain"))},
		{name: "account_full", env: with("WALPOST_NATS_URL", s.natsURL("full"))},
		{name: "unknown_domain", waits: true, env: map[string]string{"WALPOST_NATS_DOMAIN": "leaf"}},
	}
}

// streamCases have a stream that cannot keep the promise.
func streamCases(s *site) []badStart {
	_, err := s.js.CreateStream(s.t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	s.must(err)
	never := map[string]string{"WALPOST_CREATE_STREAM": "false"}
	of := func(name string, change func(*jetstream.StreamConfig)) *jetstream.StreamConfig {
		c := &jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}}
		change(c)
		return c
	}
	return []badStart{
		{name: "stream_missing", env: never},
		{
			name: "stream_missing_marked",
			sql:  `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', 1, 'placed', '{}', now())`,
		},
		{
			name: "stream_missing_slot",
			sql:  `SELECT pg_create_logical_replication_slot('stream_missing_slot', 'pgoutput')`,
			env:  map[string]string{"WALPOST_MARK": "delete"},
		},
		{name: "other_subjects", env: map[string]string{"WALPOST_STREAM": "ORDERS"}},
		{name: "subjects_taken", env: map[string]string{"WALPOST_SUBJECT": "orders.{event_type}"}},
		{name: "subject_everything", env: map[string]string{"WALPOST_SUBJECT": "{event_type}"}},
		{name: "sealed", stream: of("sealed", func(c *jetstream.StreamConfig) { c.Sealed = true })},
		{name: "no_ack", stream: of("no_ack", func(c *jetstream.StreamConfig) { c.NoAck = true })},
		{name: "persist_async", stream: of("persist_async", func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode })},
		{name: "interest", stream: of("interest", func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy })},
		{name: "workqueue", stream: of("workqueue", func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy })},
		{name: "per_subject", stream: of("per_subject", func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 })},
		{name: "few_messages", stream: of("few_messages", func(c *jetstream.StreamConfig) { c.MaxMsgs = 100 })},
		{name: "message_ttl", stream: of("message_ttl", func(c *jetstream.StreamConfig) { c.AllowMsgTTL = true })},
		{name: "mirror", stream: of("mirror", func(c *jetstream.StreamConfig) { c.Subjects, c.Mirror = nil, &jetstream.StreamSource{Name: "ORDERS"} })},
		{name: "sources", stream: of("sources", func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "ORDERS"}} })},
	}
}
