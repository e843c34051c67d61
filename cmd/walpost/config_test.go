package main

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

func loadFile(t *testing.T, yaml string, args ...string) (*loader, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "walpost.yaml")
	if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := &cobra.Command{}
	addConfigFlags(cmd)
	if err := cmd.ParseFlags(append(args, "--config", path)); err != nil {
		t.Fatal(err)
	}
	return load(cmd.Flags())
}

func TestExampleIsTheDefaults(t *testing.T) {
	l, err := loadFile(t, exampleYAML())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(l.cfg, defaultConfig()) {
		t.Errorf("the example loads as %+v", l.cfg)
	}
	for _, k := range l.cfg.keys() {
		if !strings.HasSuffix(l.origin[k.name], ".yaml:"+regexp.MustCompile(`\d+$`).FindString(l.origin[k.name])) {
			t.Errorf("%s is not in the example: %q", k.name, l.origin[k.name])
		}
	}
}

// Every field is in the table: a field that is not could not be set by anybody.
func TestEveryFieldHasAKey(t *testing.T) {
	cfg := defaultConfig()
	var fields int
	whole := []reflect.Type{
		reflect.TypeFor[LayoutConfig](), reflect.TypeFor[MarkConfig](), reflect.TypeFor[HeadersConfig](),
	}
	var count func(v reflect.Value)
	count = func(v reflect.Value) {
		switch {
		case slices.Contains(whole, v.Type()) || v.Kind() != reflect.Struct && v.Kind() != reflect.Slice:
			fields++
		case v.Kind() == reflect.Slice:
			count(v.Index(0))
		default:
			for i := range v.NumField() {
				count(v.Field(i))
			}
		}
	}
	count(reflect.ValueOf(cfg).Elem())
	if n := len(cfg.keys()); n != fields {
		t.Errorf("%d keys for %d fields", n, fields)
	}
	names, envs, flags := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, k := range cfg.keys() {
		if names[k.name] || envs[k.env] || flags[k.flag()] || !strings.HasPrefix(k.env, "WALPOST_") || k.help == "" {
			t.Errorf("%s [%s] --%s: not unique, or no help", k.name, k.env, k.flag())
		}
		names[k.name], envs[k.env], flags[k.flag()] = true, true, true
	}
}

// Names and defaults are a contract with the programs that drive walpost.
func TestContract(t *testing.T) {
	want := map[string][2]string{
		"postgres.url":              {"WALPOST_POSTGRES_URL", "postgres://localhost:5432/postgres"},
		"postgres.url_file":         {"WALPOST_POSTGRES_URL_FILE", ""},
		"postgres.password_file":    {"WALPOST_POSTGRES_PASSWORD_FILE", ""},
		"postgres.slot":             {"WALPOST_SLOT", "walpost"},
		"postgres.publication":      {"WALPOST_PUBLICATION", "walpost"},
		"postgres.max_retained_wal": {"WALPOST_MAX_RETAINED_WAL", "10GB"},
		"postgres.initial":          {"WALPOST_INITIAL", ""},
		"postgres.schema":           {"WALPOST_SCHEMA", ""},
		"postgres.owner":            {"WALPOST_OWNER", ""},
		"source":                    {"WALPOST_SOURCE", ""},
		"shard":                     {"WALPOST_SHARD", ""},
		"outboxes[0].table":         {"WALPOST_TABLE", "public.outbox_messages"},
		"outboxes[0].layout":        {"WALPOST_LAYOUT", "canonical"},
		"outboxes[0].mark":          {"WALPOST_MARK", "update"},
		"outboxes[0].name":          {"WALPOST_OUTBOX_NAME", ""},
		"outboxes[0].where":         {"WALPOST_WHERE", ""},
		"outboxes[0].headers":       {"WALPOST_HEADERS", ""},
		"nats.url":                  {"WALPOST_NATS_URL", "nats://localhost:4222"},
		"nats.creds":                {},
		"nats.nkey":                 {},
		"nats.user":                 {},
		"nats.password_file":        {},
		"nats.token_file":           {"WALPOST_NATS_TOKEN_FILE", ""},
		"nats.tls.ca":               {},
		"nats.tls.cert":             {},
		"nats.tls.key":              {},
		"nats.tls.handshake_first":  {"WALPOST_NATS_TLS_FIRST", "false"},
		"nats.domain":               {},
		"nats.inbox_prefix":         {},
		"nats.shared":               {"WALPOST_SHARED", "false"},
		"nats.accept_weak_stream":   {"", "false"},
		"nats.stream":               {"WALPOST_STREAM", "EVENTS"},
		"nats.create_stream":        {"WALPOST_CREATE_STREAM", "true"},
		"nats.subject":              {"WALPOST_SUBJECT", "events.{event_type}"},
		"nats.format":               {"WALPOST_FORMAT", "binary"},
		"publish.window":            {"WALPOST_WINDOW", "4096"},
		"publish.window_bytes":      {"", "32MiB"},
		"publish.batch":             {"WALPOST_BATCH", "auto"},
		"mode":                      {"WALPOST_MODE", "auto"},
		"fallback.interval":         {"WALPOST_FALLBACK_INTERVAL", "30s"},
		"fallback.batch":            {"", "100"},
		"fallback.delay_threshold":  {"", "1s"},
		"fallback.max_attempts":     {"", "10"},
		"fallback.backoff":          {"", "30s"},
		"fallback.on_poison":        {"", "hold"},
		"retention.archive_after":   {"", "168h"},
		"catalog.path":              {"WALPOST_CATALOG", ""},
		"catalog.unknown":           {"WALPOST_CATALOG_UNKNOWN", "allow"},
		"retention.delete_after":    {"WALPOST_RETENTION_DELETE_AFTER", "0s"},
		"retention.drop_after":      {"", "2160h"},
		"retention.excluded_after":  {"WALPOST_RETENTION_EXCLUDED_AFTER", "0s"},
		"retention.interval":        {"", "1h"},
		"http.listen":               {"WALPOST_HTTP_LISTEN", "127.0.0.1:9464"},
		"http.token_file":           {"WALPOST_HTTP_TOKEN_FILE", ""},
		"http.ui":                   {"WALPOST_HTTP_UI", "false"},
		"otlp.endpoint":             {"WALPOST_OTLP_ENDPOINT", ""},
		"otlp.trace_ratio":          {"WALPOST_OTLP_TRACE_RATIO", "0.01"},
		"otlp.metrics_interval":     {"WALPOST_OTLP_METRICS_INTERVAL", "1m"},
		"log.level":                 {"WALPOST_LOG_LEVEL", "info"},
		"log.format":                {"", "auto"},
	}
	got := map[string]key{}
	for _, k := range defaultConfig().keys() {
		got[k.name] = k
	}
	if a, b := slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)); !slices.Equal(a, b) {
		t.Fatalf("keys are %q, want %q", a, b)
	}
	for name, w := range want {
		if k := got[name]; w[0] != "" && k.env != w[0] || k.String() != w[1] {
			t.Errorf("%s is [%s] %q, want [%s] %q", name, k.env, k, w[0], w[1])
		}
	}
}

func TestTables(t *testing.T) {
	l, err := loadFile(t, `
outboxes:
  - layout: canonical
  - table: Shop.OutboxEvent
    layout: {id: id, event_type: eventType, payload: body, processed_at: processedAt}
`)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := l.cfg.Tables()
	if err != nil || len(tables) != 2 {
		t.Fatalf("tables = %+v, %v", tables, err)
	}
	if a := tables[0]; a.String() != "public.outbox_messages" || a.Layout != outbox.Canonical() || a.Mark != outbox.MarkUpdate {
		t.Errorf("first table = %+v", a)
	}
	if b := tables[1]; b.String() != "Shop.OutboxEvent" || b.Layout.Columns[outbox.Payload] != "body" || b.Mark != outbox.MarkUpdate {
		t.Errorf("second table = %+v", b)
	}
}

func TestSizes(t *testing.T) {
	tests := map[string]int64{
		"0": 0, "17": 17, "17B": 17, "10GB": 10e9, "10gb": 10e9, "32MiB": 32 << 20, "1.5 KiB": 1536, "1TB": 1e12, "2TiB": 2 << 40,
		"9223372036854775807": 1<<63 - 1,
	}
	for text, want := range tests {
		got, err := parseSize(text)
		if err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v, want %d", text, got, err, want)
		}
		if again, err := parseSize(formatSize(want)); err != nil || again != want {
			t.Errorf("formatSize(%d) = %q, which is %d, %v", want, formatSize(want), again, err)
		}
	}
	for _, text := range []string{"", "GB", "-1", "10 gigs", "1e9", "1,5GB", "9223372036854775808", "9TB9", "99999999999TB"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", text, got)
		}
	}
}

func TestFormatDuration(t *testing.T) {
	for text, d := range map[string]time.Duration{
		"168h": 168 * time.Hour, "1h30m": 90 * time.Minute, "30s": 30 * time.Second, "1m": time.Minute, "100ms": 100 * time.Millisecond,
		"0s": 0, "1h0m5s": time.Hour + 5*time.Second, "10m": 10 * time.Minute, "20h": 20 * time.Hour,
	} {
		if got := formatDuration(d); got != text {
			t.Errorf("formatDuration(%v) = %q, want %q", d, got, text)
		}
	}
}

func TestRedaction(t *testing.T) {
	for in, want := range map[string]string{
		"postgres://localhost/db":                        "postgres://localhost/db",
		"postgres://u@h/db":                              "postgres://u@h/db",
		"postgres://u:p@h/db":                            "postgres://u:xxxxx@h/db",
		"postgres://u:p/w@q@h/db":                        "postgres://u:xxxxx@h/db",
		"postgres://h/db?password=p&sslmode=require":     "postgres://h/db?password=xxxxx&sslmode=require",
		"host=h password=p user=u":                       "host=h password=xxxxx user=u",
		`host=h password = 'a \' b' user=u`:              "host=h password = xxxxx user=u",
		"postgres://h/db?sslpassword=p&sslkey=client.ke": "postgres://h/db?sslpassword=xxxxx&sslkey=client.ke",
		"host=h password=a://b user=u":                   "host=h password=xxxxx user=u",
		"host=h passwrod=p user=u":                       "host=h passwrod=xxxxx user=u",
		"postgres://h/db?passwrod=p&sslmode=require":     "postgres://h/db?passwrod=xxxxx&sslmode=require",
		"postgres://h/db?pass%77ord=p":                   "postgres://h/db?pass%77ord=xxxxx",
		`host=h password=a\ b&c\'d user=u`:               "host=h password=xxxxx user=u",
		`host=h password='a\' b' dbname='my db'`:         "host=h password=xxxxx dbname='my db'",
	} {
		if got := redactPostgres(in); got != want {
			t.Errorf("redactPostgres(%q) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{
		"nats://h:4222,h2:4222":        "nats://h:4222,nats://h2:4222",
		"nats://u:p@h,nats://t@h2":     "nats://u:xxxxx@h,nats://xxxxx@h2",
		"u:p@h:4222":                   "xxxxx",
		"nats://u:p%zz@h, tls://u:p@h": "xxxxx",
		"nats://u:p,x@h":               "xxxxx",
		"s3cret":                       "xxxxx",
	} {
		if got := redactNATS(in); strings.ReplaceAll(got, " ", "") != want {
			t.Errorf("redactNATS(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	names := []string{"slot", "publication", "max_retained_wal", ""}
	for typed, want := range map[string]string{
		"slto": "did you mean slot?", "max_retaind_wal": "did you mean max_retained_wal?", "Publication": "did you mean publication?",
		"x": "", "elephant": "",
	} {
		if got := didYouMean(typed, names); got != want {
			t.Errorf("didYouMean(%q) = %q, want %q", typed, got, want)
		}
	}
}

func TestValidateNamesEveryProblem(t *testing.T) {
	cfg := defaultConfig()
	cfg.Outboxes = nil
	cfg.Mode = "stroll"
	cfg.NATS.InboxPrefix = "a..b"
	cfg.Source = "two words"
	err := cfg.validate(nil)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"outboxes: the list is empty", "mode: \"stroll\"", "nats.inbox_prefix:", "source:"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
	if hint.Of(err) == "" {
		t.Error("no hint")
	}
	if err := defaultConfig().validate(nil); err != nil {
		t.Errorf("the defaults are invalid: %v", err)
	}
	cfg = defaultConfig()
	cfg.Shard = "1/4"
	if err := cfg.validate(nil); err == nil || !strings.Contains(hint.Of(err), "walpost_1") {
		t.Errorf("a shard with the default slot: %v", err)
	}
	if cfg.Postgres.Slot = "walpost_1"; cfg.validate(nil) != nil {
		t.Errorf("a shard with its own slot: %v", cfg.validate(nil))
	}
}
