package house

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/walpost/walpost/"

// rooms says, for each room of the house, what it may import besides the
// standard library and itself. A trailing slash means "and everything below".
// internal/hint is a leaf that everybody may lean on, outbox and decode excepted.
var rooms = map[string][]string{
	"outbox":   {},
	"decode":   {module + "outbox"},
	"stream":   {module + "outbox", module + "decode", check, hint, pg, pgx, pgerrcode, "github.com/jackc/pglogrepl", zap},
	"publish":  {module + "outbox", jetstream, hint, nats},
	"fallback": {module + "outbox", alarm, table, crash, sleep, zap},
	"relay": {
		module + "outbox", module + "stream", module + "publish", module + "fallback", alarm, deadletter, jetstream, retention, table, check, crash, hint, sleep, zap, prometheus, otel, otel + "/",
		// For the connection that it hands to publish, and the names of its errors.
		nats,
		// What a URL says of TLS, and which error of PostgreSQL it is; connections are stream's and table's.
		pg, pgerrcode,
	},
	// For applications: nothing of the relay.
	"catalog":             {module + "outbox", hint, yaml, "github.com/santhosh-tekuri/jsonschema/v6"},
	"consume":             {module + "outbox", consumers, jetstream, hint, pg, sleep, pgx, pgerrcode, nats, prometheus, otel, otel + "/"},
	"idempotency":         {module + "outbox", keys, pg, sleep, pgx, pgerrcode},
	"internal/drill":      {module + "outbox", module + "verify", audit, jetstream, table, hint, pg, sleep, pgx, pgerrcode},
	"internal/deadletter": {module + "outbox", table, hint, pg, pgx},
	"internal/retention":  {module + "outbox", keys, partition, table, hint, pg, sleep, pgx, pgerrcode},
	"verify":              {module + "outbox", jetstream, table, sleep, "github.com/RoaringBitmap/roaring/v2/roaring64"},
	"bench":               {hint, pg, sleep, pgx, nats},
	"internal/pg":         {module + "outbox", hint, secretfile, sleep, pgx, pgerrcode},
	"internal/partition":  {module + "outbox", hint, pg, sleep, pgx, pgerrcode},
	"migrations":          {module + "outbox", partition, hint, pg, sleep, pgx, pgerrcode},

	"internal/alarm": {},
	"internal/check": {hint},
	"internal/console": {
		module + "outbox", module + "publish", alarm, check, consumers, deadletter, hint, jetstream, pg, module + "internal/status", sleep, table, pgx, nats,
		pgerrcode, zap, "github.com/prometheus/client_model/", "github.com/prometheus/common/",
	},
	"internal/consumers":  {module + "outbox", hint, pg, pgx, pgerrcode},
	"internal/crash":      {},
	"internal/keys":       {},
	"internal/jetstream":  {module + "outbox", check, hint, secretfile, sleep, nats},
	"internal/secretfile": {hint},
	"internal/setup":      {module + "outbox", module + "stream", module + "migrations", table, crash, hint, pg, secretfile, pgx, pgerrcode},
	"internal/site":       {"github.com/yuin/goldmark"},
	"internal/sleep":      {},
	"internal/status":     {module + "outbox", module + "stream", consumers, hint, jetstream, pg, table, pgerrcode},
	"internal/telemetry":  {hint, prometheus, otel, otel + "/", "github.com/go-logr/logr", "go.opentelemetry.io/contrib/bridges/prometheus"},
	"internal/table":      {module + "outbox", check, hint, partition, pg, pgx, pgerrcode},
}

const (
	alarm      = module + "internal/alarm"
	audit      = module + "internal/e2e/audit"
	check      = module + "internal/check"
	consumers  = module + "internal/consumers"
	deadletter = module + "internal/deadletter"
	crash      = module + "internal/crash"
	hint       = module + "internal/hint"
	jetstream  = module + "internal/jetstream"
	keys       = module + "internal/keys"
	partition  = module + "internal/partition"
	pg         = module + "internal/pg"
	retention  = module + "internal/retention"
	secretfile = module + "internal/secretfile"
	sleep      = module + "internal/sleep"
	table      = module + "internal/table"
	pgx        = "github.com/jackc/pgx/"
	nats       = "github.com/nats-io/nats.go"
	pgerrcode  = "github.com/jackc/pgerrcode"
	zap        = "go.uber.org/zap"
	prometheus = "github.com/prometheus/client_golang/"
	otel       = "go.opentelemetry.io/otel"
	yaml       = "go.yaml.in/yaml/v3"
)

type pkg struct {
	ImportPath string
	Dir        string
	Standard   bool
	GoFiles    []string
	Imports    []string
}

func TestNobodyImportsWhatTheyMustNot(t *testing.T) {
	standard := map[string]bool{}
	for _, p := range list(t, "std") {
		standard[p.ImportPath] = true
	}
	seen := 0
	for _, p := range list(t, module+"...") {
		room := strings.TrimPrefix(p.ImportPath, module)
		allowed, ruled := rooms[room]
		if !ruled {
			continue
		}
		seen++
		for _, imported := range p.Imports {
			if !standard[imported] && !slices.ContainsFunc(allowed, func(rule string) bool { return permits(rule, imported) }) {
				t.Errorf("%s imports %s, which the house does not allow", room, imported)
			}
		}
	}
	if seen != len(rooms) {
		t.Errorf("found %d of %d rooms", seen, len(rooms))
	}
}

// TestConnectionsAreOpenedByOnePackage: internal/pg gives every connection its search_path. Programs that start servers of
// their own (they import internal/testenv) play the application, too, and connect as that does.
func TestConnectionsAreOpenedByOnePackage(t *testing.T) {
	opens := regexp.MustCompile(`\b(?:pgx|pgconn|pgxpool|sql)\.(?:Connect|ConnectConfig|ConnectWithOptions|ParseConfig|ParseConfigWithOptions|New|NewWithConfig|Open|OpenDB)\(`)
	opened := 0
	for _, p := range list(t, module+"...") {
		if strings.HasPrefix(p.ImportPath, module+"internal/testenv") || slices.Contains(p.Imports, module+"internal/testenv") {
			continue
		}
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range opens.FindAllString(string(text), -1) {
				if opened++; p.ImportPath != pg {
					t.Errorf("%s/%s calls %s), which only %s may", p.ImportPath, file, found, pg)
				}
			}
		}
	}
	if opened == 0 {
		t.Error("no connection is opened anywhere: the test looks for other names than the code has")
	}
}

// TestServersStayOutOfTheRelay: the broker is linked into the demo and the tests
// only, and no program imports test helpers except the demo.
func TestServersStayOutOfTheRelay(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", module+"cmd/walpost").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 100 {
		t.Fatalf("go list names only %d dependencies", len(deps))
	}
	for _, d := range deps {
		if strings.HasPrefix(d, "github.com/nats-io/nats-server/") || strings.HasPrefix(d, module+"internal/testenv") {
			t.Errorf("cmd/walpost links %s", d)
		}
	}
}

func permits(rule, path string) bool {
	if strings.HasSuffix(rule, "/") {
		return strings.HasPrefix(path, rule)
	}
	return path == rule || strings.HasPrefix(path, rule+"/")
}

func list(t *testing.T, pattern string) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,Imports,Standard", pattern)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v", pattern, err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}
