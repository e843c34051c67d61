package catalog_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

const placed = `name: order.placed
version: 1
owner: shop
description: A customer has placed an order.
aggregate_type: order
consumers: [billing]
replay: safe
schema:
  type: object
  required: [total, currency]
  properties:
    total: {type: integer, minimum: 0}
    currency: {enum: [EUR, USD]}
    email: {type: string, x-pii: true}
    items: {type: array, items: {$ref: '#/$defs/item'}}
  additionalProperties: false
  $defs:
    item: {type: object, required: [sku], properties: {sku: {type: string, pattern: '^[A-Z]+$'}}}
`

// files is a catalogue in memory, from pairs of names and texts.
func files(pairs ...string) fstest.MapFS {
	fsys := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		fsys[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return fsys
}

func load(t *testing.T, pairs ...string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Load(files(pairs...))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// edit replaces one text of the entry above.
func edit(t *testing.T, old, now string) string {
	t.Helper()
	if strings.Count(placed, old) != 1 {
		t.Fatalf("%q is not in the entry once", old)
	}
	return strings.Replace(placed, old, now, 1)
}

// TestProblems: each has its place, its code and advice; those of the first group keep a catalogue from being loaded.
func TestProblems(t *testing.T) {
	second := "---\n" + edit(t, "version: 1", "version: 2")
	for _, tt := range []struct {
		name, text, want string
		loads            bool
	}{
		{"fine", placed, "", true},
		{"two versions", placed + second, "", true},
		{"empty documents", "---\n---\n" + placed + "---\n# nothing\n", "", true},
		{"not YAML", "name: [", "a.yaml: catalog-yaml", false},
		{"tab", "name:\n\t- x", "a.yaml: catalog-yaml", false},
		{"a list", "- name: x", "a.yaml:1: catalog-entry an entry is a mapping", false},
		{"nothing", "# nothing", "catalog-empty the catalogue has no entry", false},
		{"unknown key", edit(t, "owner:", "ower: x\nowner:"), `a.yaml:3: catalog-entry unknown key "ower"`, false},
		{"key twice", placed + "owner: me\n", "a.yaml:19: catalog-entry key owner is given twice, first in line 3", false},
		{"no owner", edit(t, "owner: shop\n", ""), "a.yaml:1: catalog-entry an entry without owner", false},
		{"empty owner", edit(t, "owner: shop", "owner:"), "a.yaml:3: catalog-entry owner has no text", false},
		{"no schema", placed[:strings.Index(placed, "schema:")], "a.yaml:1: catalog-entry an entry without schema", false},
		{"version 0", edit(t, "version: 1", "version: 0"), `a.yaml:2: catalog-entry version "0" is no number`, false},
		{"version v1", edit(t, "version: 1", "version: v1"), `a.yaml:2: catalog-entry version "v1" is no number`, false},
		{"large version", edit(t, "version: 1", "version: 32768"), `a.yaml:2: catalog-entry version "32768" is no number`, false},
		{"consumers", edit(t, "[billing]", "billing"), "a.yaml:6: catalog-entry consumers is not a list", false},
		{"replay", edit(t, "replay: safe", "replay: maybe"), `a.yaml:7: catalog-entry replay "maybe" is neither`, false},
		{"unsafe", edit(t, "replay: safe", "replay: unsafe"), "a.yaml:1: catalog-entry replay is unsafe, and no replay_note", false},
		{"unsafe with note", edit(t, "replay: safe", "replay: unsafe\nreplay_note: sends mail"), "", true},
		{"same version", placed + "---\n" + placed, "a.yaml:20: catalog-twice order.placed version 1 is here and in a.yaml:1", false},
		{
			"two owners", placed + strings.Replace(second, "owner: shop", "owner: billing", 1),
			`a.yaml:20: catalog-owner order.placed has the owner "billing" here, and "shop" in a.yaml:1`, false,
		},
		{"no type", edit(t, "{type: integer, minimum: 0}", "{type: int}"), "a.yaml:1: catalog-schema the schema of order.placed version 1: /properties/total/type: \"int\" is none of array, boolean, ", false},
		{"look-ahead", edit(t, "^[A-Z]+$", "(?=x)"), `a.yaml:1: catalog-schema the schema of order.placed version 1: `, false},
		{"no such def", edit(t, "{$ref: '#/$defs/item'}", "{$ref: '#/$defs/itm'}"), "a.yaml:1: catalog-schema ", false},
		{"network", edit(t, "{$ref: '#/$defs/item'}", "{$ref: 'https://example.com/item.json'}"), "a.yaml:1: catalog-schema the schema of order.placed version 1: $ref to https://example.com/item.json: it is not in the catalogue", false},
		{"outside", edit(t, "{$ref: '#/$defs/item'}", "{$ref: '../../etc/passwd'}"), "a.yaml:1: catalog-schema the schema of order.placed version 1: $ref to etc/passwd: the catalogue has no file etc/passwd", false},
		{"alias", edit(t, "{type: integer, minimum: 0}", "&x {type: integer}") + "    more: *x\n", "a.yaml:19: catalog-entry a schema with a YAML alias", false},
		{"hexadecimal", edit(t, "minimum: 0", "minimum: 0x10"), `a.yaml:12: catalog-entry "0x10" is no value of JSON`, false},
		{"infinite", edit(t, "minimum: 0", "minimum: .inf"), `a.yaml:12: catalog-entry ".inf" is no value of JSON`, false},
		{"schema file", placed[:strings.Index(placed, "schema:")] + "schema_file: none.json\n", "a.yaml:1: catalog-schema schema_file \"none.json\": the catalogue has no file none.json", false},
		{"both schemas", placed + "schema_file: none.json\n", "a.yaml:19: catalog-entry schema and schema_file are alternatives", false},

		{"updated", edit(t, "order.placed", "order.updated"), "a.yaml:1: catalog-name event type order.updated says only that something was updated", true},
		{"OrderUpdated", edit(t, "order.placed", "OrderAddressUpdated"), "a.yaml:1: catalog-name event type OrderAddressUpdated says only", true},
		{"changed", edit(t, "order.placed", "order.changed"), "a.yaml:1: catalog-name event type order.changed does not say what was changed", true},
		{"price changed", edit(t, "order.placed", "order.price_changed"), "", true},
		{"present tense", edit(t, "order.placed", "order.place"), "a.yaml:1: catalog-name event type order.place has no past participle", true},
		{"PlaceOrder", edit(t, "order.placed", "PlaceOrder"), "a.yaml:1: catalog-name event type PlaceOrder has no past participle", true},
		{"OrderPlaced", edit(t, "order.placed", "OrderPlaced"), "", true},
		{"order_sent", edit(t, "order.placed", "order_sent"), "", true},
		{"HTTPRequestSent", edit(t, "order.placed", "HTTPRequestSent"), "", true},
		{"wildcard", edit(t, "order.placed", "order.>"), `a.yaml:1: catalog-name event type "order.>" cannot stand in a subject`, true},
		{"no mark", edit(t, ", x-pii: true", ""), "a.yaml:1: catalog-pii order.placed version 1: email may be personal data, and has no x-pii", true},
		{"not a mark", edit(t, "x-pii: true", "x-pii: maybe"), "a.yaml:1: catalog-pii order.placed version 1: x-pii of email is neither true nor false", true},
		{"no mark inside", edit(t, "{sku:", "{phone_no: {type: string}, sku:"), "a.yaml:1: catalog-pii order.placed version 1: items[].phone_no may be personal", true},
		{
			"mark around", strings.Replace(edit(t, "{type: array,", "{type: array, x-pii: true,"), "{sku:", "{phone_no: {type: string}, sku:", 1),
			"", true,
		},
		{
			"no around", strings.Replace(edit(t, "{type: array,", "{type: array, x-pii: false,"), "{sku:", "{phone_no: {type: string}, sku:", 1),
			"a.yaml:1: catalog-pii order.placed version 1: items[].phone_no may be personal", true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, problems := catalog.Check(files("a.yaml", tt.text))
			var got []string
			for _, p := range problems {
				place := p.Error()[:len(p.Error())-len(p.Text)]
				got = append(got, place+p.Code+" "+p.Text)
				if p.Fix == "" {
					t.Errorf("%s: no advice", p.Error())
				}
			}
			if tt.want == "" && len(got) > 0 || tt.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], tt.want)) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if _, err := catalog.Load(files("a.yaml", tt.text)); (err == nil) != tt.loads {
				t.Errorf("loading ends with %v", err)
			}
		})
	}
}

// TestAllProblemsAtOnce: of several entries and files, in the order of files and lines.
func TestAllProblemsAtOnce(t *testing.T) {
	_, problems := catalog.Check(files("b.yaml", edit(t, "owner: shop\n", ""), "teams/a.yml",
		edit(t, "order.placed", "order.place")+"---\nnam: x\n", "notes.txt", "no catalogue", ".git/x.yaml", "["))
	var got []string
	for _, p := range problems {
		got = append(got, fmt.Sprintf("%s:%d %s", p.File, p.Line, p.Code))
	}
	want := []string{
		"b.yaml:1 catalog-entry", "teams/a.yml:1 catalog-name", "teams/a.yml:20 catalog-entry", "teams/a.yml:20 catalog-entry",
		"teams/a.yml:20 catalog-entry", "teams/a.yml:20 catalog-entry", "teams/a.yml:20 catalog-entry",
		"teams/a.yml:20 catalog-entry", "teams/a.yml:20 catalog-entry",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestAllProblemsOfAnEntry: one that cannot be used has the other problems, too, and cannot be found.
func TestAllProblemsOfAnEntry(t *testing.T) {
	text := strings.NewReplacer("owner: shop\n", "", "order.placed", "order.place", ", x-pii: true", "", "^[A-Z]+$", "(?=x)").Replace(placed)
	c, problems := catalog.Check(files("a.yaml", text))
	var got []string
	for _, p := range problems {
		got = append(got, p.Code)
	}
	if want := "catalog-entry catalog-schema catalog-name catalog-pii"; strings.Join(got, " ") != want {
		t.Errorf("got %q, want %s", got, want)
	}
	if len(c.Entries()) > 0 || c.Knows("order.place") {
		t.Error("the entry can be used")
	}
}

func TestDirectories(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "does not exist", file: "is not a directory", dir: "the catalogue has no *.yaml file",
	} {
		_, err := catalog.LoadDir(path)
		var problems catalog.Problems
		advice := hint.Of(err)
		if errors.As(err, &problems) {
			advice = problems[0].Fix
		}
		if err == nil || !strings.Contains(err.Error(), want) || advice == "" {
			t.Errorf("%s: %v (%s), want %q", path, err, advice, want)
		}
	}
}

// TestPayloads: the error names the path, and never a value.
func TestPayloads(t *testing.T) {
	c := load(t, "a.yaml", placed)
	for _, tt := range []struct{ payload, want string }{
		{`{"total": 1, "currency": "EUR", "items": [{"sku": "A"}]}`, ""},
		{`{"total": 1.0, "currency": "EUR"}`, ""},
		{`{"total": 9007199254740993, "currency": "EUR"}`, ""},
		{`{"total": 1.5, "currency": "EUR"}`, "/total: number instead of integer"},
		{`{"total": 9007199254740993.5, "currency": "EUR"}`, "/total: number instead of integer"},
		{`{"total": "secret", "currency": "EUR"}`, "/total: string instead of integer"},
		{`{"total": -1, "currency": "EUR"}`, "/total: it does not fit minimum"},
		{`{"total": 1}`, "the payload: without currency"},
		{`{}`, "the payload: without currency, total"},
		{`{"total": 1, "currency": "secret"}`, "/currency: none of the values of enum"},
		{`{"total": 1, "currency": "EUR", "é\n": 1}`, `the payload: the schema does not allow \u00e9\n`},
		{`{"total": 1, "currency": "EUR", "items": [{"sku": "A"}, {"sku": "secret"}]}`, `/items/1/sku: it does not match the pattern "^[A-Z]+$"`},
		{`[]`, "the payload: array instead of object"},
		{`null`, "the payload: null instead of object"},
		{`{"total": 1`, "the payload: it is not JSON"},
		{`{} {}`, "the payload: it is not JSON"},
		{``, "the payload: it is not JSON"},
		{"\xff", "the payload: it is not JSON"},
		{strings.Repeat("[", 1_000_000), "the payload: it is nested deeper than 100"},
		{"[" + strings.Repeat("0,", 500_000) + "0]", "the payload: it has more than 100000 values"},
		{`{"total": 1e999999999}`, "the payload: a number has more than 400 characters, or such an exponent"},
		{`{"total": ` + strings.Repeat("9", 1_000_000) + `}`, "the payload: a number has more than 400 characters, or such an exponent"},
		{`{"total": 1e300, "currency": "EUR"}`, ""},
		{`{"total": 1, "currency": "EUR", "email": "1e999999999 [[[ \" 1e999999999"}`, ""},
	} {
		err := c.Validate("order.placed", 1, []byte(tt.payload))
		got := ""
		if err != nil {
			got = strings.TrimPrefix(err.Error(), "order.placed version 1: ")
			var payload *catalog.PayloadError
			if !errors.As(err, &payload) || len(payload.Faults) == 0 {
				t.Errorf("%.60s: %T", tt.payload, err)
			}
		}
		if got != tt.want || strings.Contains(got, "secret") {
			t.Errorf("%.80s: %q, want %q", tt.payload, got, tt.want)
		}
	}
}

// TestPathsOfHostileNames: they are printable ASCII, and short.
func TestPathsOfHostileNames(t *testing.T) {
	c := load(t, "a.yaml", placed[:strings.Index(placed, "schema:")]+"schema: {$ref: '#/$defs/tree', $defs: {tree: {type: object, additionalProperties: {$ref: '#/$defs/tree'}}}}")
	for name, want := range map[string]string{
		"é\n\x1b[31m": `/\u00e9\n\x1b[31m: number instead of object`, "a/b": "/a~1b: number instead of object",
		strings.Repeat("é", 50_000): "/" + strings.Repeat(`\u00e9`, 30) + "...: number instead of object",
	} {
		payload, err := json.Marshal(map[string]int{name: 1})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Validate("order.placed", 1, payload)
		if err == nil || strings.TrimPrefix(err.Error(), "order.placed version 1: ") != want {
			t.Errorf("error %.300v, want %s", err, want)
		}
	}
	deep := []byte(strings.Repeat(`{"a name of some length": `, 90) + "1" + strings.Repeat("}", 90))
	if err := c.Validate("order.placed", 1, deep); err == nil || len(err.Error()) > 300 {
		t.Errorf("error %.500v", err)
	}
}

// TestManyFaultsAreCut: a payload that is wrong everywhere has a short error, in bounded time.
func TestManyFaultsAreCut(t *testing.T) {
	c := load(t, "a.yaml", edit(t, "{$ref: '#/$defs/item'}}", "{type: string}, uniqueItems: true}"))
	start := processors(t)
	for _, item := range []string{"0", "1e400", "-1e-400", `{"a":1}`} {
		payload := `{"total": 1, "currency": "EUR", "items": [` + strings.Repeat(item+",", 45_000) + item + `]}`
		err := c.Validate("order.placed", 1, []byte(payload))
		if err == nil || len(err.Error()) > 500 || !strings.Contains(err.Error(), "more)") {
			t.Errorf("%s: %.600v", item, err)
		}
	}
	if d := processors(t) - start; d > 20*time.Second {
		t.Errorf("four hostile payloads took %s", d)
	}
}

// processors is the processors' time that this program has had, which other programs do not add to.
func processors(t *testing.T) time.Duration {
	t.Helper()
	var had syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &had); err != nil {
		t.Fatal(err)
	}
	return time.Duration(had.Utime.Nano() + had.Stime.Nano())
}

func TestVersions(t *testing.T) {
	c := load(t, "a.yaml", placed, "b.yaml", strings.NewReplacer("version: 1", "version: 3", "total", "sum").Replace(placed))
	for _, tt := range []struct {
		name    string
		version int
		payload string
		unknown bool
		fits    bool
	}{
		{"order.placed", 1, `{"total": 1, "currency": "EUR"}`, false, true},
		{"order.placed", 0, `{"total": 1, "currency": "EUR"}`, false, true},
		{"order.placed", 3, `{"sum": 1, "currency": "EUR"}`, false, true},
		{"order.placed", 3, `{"total": 1, "currency": "EUR"}`, false, false},
		{"order.placed", 2, `{"sum": 1, "currency": "EUR"}`, true, false},
		{"order.placed", -1, `{}`, true, false},
		{"order\n", 1, `{}`, true, false},
	} {
		err := c.CheckMessage(outbox.Message{EventType: tt.name, EventVersion: int16(tt.version), Payload: []byte(tt.payload)})
		if errors.Is(err, catalog.ErrUnknown) != tt.unknown || (err == nil) != tt.fits {
			t.Errorf("%s version %d %s: %v", tt.name, tt.version, tt.payload, err)
		}
	}
	if err := c.Validate("a\nb", 1, nil); strings.Contains(err.Error(), "\n") {
		t.Errorf("the error has a name as it is: %q", err)
	}
}

// TestFilesReferToFiles, by path and by $id.
func TestFilesReferToFiles(t *testing.T) {
	c := load(t, "orders/a.yaml", edit(t, "{type: integer, minimum: 0}", "{$ref: '../common/money%20v1.json#/$defs/amount'}"),
		"common/money v1.json", `{"$defs": {"amount": {"$ref": "https://shop.example/cents"}}}`,
		"common/cents.json", `{"$id": "https://shop.example/cents", "type": "integer", "maximum": 10}`,
		"orders/b.yaml", strings.Replace(placed[:strings.Index(placed, "aggregate_type")], "version: 1", "version: 2", 1)+"replay: safe\nschema_file: ../common/cents.json\n")
	for _, tt := range []struct {
		version int
		payload string
		fits    bool
	}{
		{1, `{"total": 10, "currency": "EUR"}`, true},
		{1, `{"total": 11, "currency": "EUR"}`, false},
		{2, `10`, true},
		{2, `11`, false},
	} {
		if err := c.Validate("order.placed", tt.version, []byte(tt.payload)); (err == nil) != tt.fits {
			t.Errorf("version %d of %s: %v", tt.version, tt.payload, err)
		}
	}
}

// TestConcurrentUse is for the race detector.
func TestConcurrentUse(t *testing.T) {
	c := load(t, "a.yaml", placed)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 200 {
				err := c.Validate("order.placed", 1, fmt.Appendf(nil, `{"total": %d, "currency": "EUR"}`, i-4))
				if (err == nil) != (i >= 4) {
					t.Error(i, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestNamesOfMembers: what the relay writes into logs and last_error has no names of members but those of the schema.
func TestNamesOfMembers(t *testing.T) {
	c := load(t, "a.yaml", edit(t, "email: {type: string, x-pii: true}", "email: {type: object, additionalProperties: {type: object, properties: {total: {type: integer}}}}"))
	for payload, want := range map[string]string{
		`{"total": 1, "currency": "EUR", "ann@example.com": 1, "items": []}`:                                            "the payload: the schema does not allow 1 of its members",
		`{"total": 1, "currency": "EUR", "email": {"ann@example.com": {"total": "x"}, "491701234567": {"total": "x"}}}`: "/email/*/total: string instead of integer; /email/*/total: string instead of integer",
		`{"total": 1, "currency": "EUR", "items": [{"sku": "A"}, {"sku": "secret"}]}`:                                   `/items/1/sku: it does not match the pattern "^[A-Z]+$"`,
		`{"total": 1`: "the payload: it is not JSON",
	} {
		ev := &outbox.Event{}
		ev.Values[outbox.EventType], ev.Values[outbox.EventVersion], ev.Values[outbox.Payload] = []byte("order.placed"), []byte("1"), []byte(payload)
		var row *outbox.RowError
		if err := c.CheckEvent(ev, false); !errors.As(err, &row) || row.Reason != "order.placed version 1: "+want {
			t.Errorf("%s: %v, want %q", payload, err, want)
		}
		if err := c.Validate("order.placed", 1, []byte(payload)); strings.Contains(payload, "ann") && !strings.Contains(err.Error(), "ann@example.com") {
			t.Errorf("a producer is not told the name: %v", err)
		}
	}
}
