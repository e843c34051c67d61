package browser

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

var binary = regexp.MustCompile(`[KMGT]iB`)

// inexact are the labels of axes of durations that are not the value that they stand at.
const inexact = `[[f.secondSteps, f.seconds, 1], [f.millisecondSteps, f.milliseconds, 1000]].flatMap(([steps, label, base]) => {
	const size = {d: 86400, h: 3600, min: 60, s: 1, ms: 0.001}
	const value = (text) => [...text.matchAll(/([0-9.]+) ([a-z]+)/g)].reduce((sum, [, n, unit]) => sum + n * size[unit] * base, 0)
	return steps.flatMap((step) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((k) => [+(k * step).toPrecision(12), label(+(k * step).toPrecision(12))]))
		.filter(([at, text]) => Math.abs(value(text) - at) > at * 1e-9)
}).join()`

// testUnits: sizes of WAL have the unit of the budget's key, as `walpost status` prints them; numbers agree with their nouns.
func testUnits(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	tile := `[...document.querySelectorAll('.tile, .chart')].filter((e) => /WAL/.test(e.innerText)).map((e) => e.innerText).join(' ')`
	b.wait(`(` + tile + `).match(/of\s+10 GB/g)?.length === 2`)
	if text := eval[string](b, tile); binary.MatchString(text) {
		t.Errorf("the overview mixes units of WAL: %q", text)
	}
	b.view("slot")
	b.wait(`document.querySelectorAll('.plot canvas').length === 2`)
	text := eval[string](b, `[document.querySelector('.facts'), ...document.querySelectorAll('.chart')].map((e) => e.innerText).join(' ')`)
	if binary.MatchString(text) || strings.Count(text, "10 GB") != 2 {
		t.Errorf("the slot's view mixes units of WAL: %q", text)
	}

	for js, want := range map[string]string{
		// budgets and sizes as in cmd/walpost's TestKeptWAL
		`f.walBudget(10e9), f.walBytes(2.5e9)`:                                             "2.5 GB",
		`f.walBudget(2 ** 30), f.walBytes(5 * 2 ** 20)`:                                    "5 MiB",
		`f.walBudget(10000 * 2 ** 20), f.walBytes(2500 * 2 ** 20)`:                         "2.44 GiB",
		`f.walBudget(null), f.walBytes(5 * 2 ** 20)`:                                       "5 MiB",
		`f.walBudget(10e9), f.walSteps().filter((n) => n === 5e6 || n === 2 ** 20).join()`: "5000000",
		`f.count(1, 'row waits', 'rows wait')`:                                             "1 row waits",
		`f.count(0, 'aggregate')`:                                                          "0 aggregates",
		`f.count(100000, 'row', 'rows', 100000)`:                                           "100,000+ rows",
		`f.rate(null) + f.rate(12)`:                                                        "–12/s",
		`[59.9, 60, 80, 599, 680, 4800].map(f.seconds).join()`:                             "59 s,1 min,1 min 20 s,9 min 59 s,11 min,1 h 20 min",
		`f.ago(new Date(Date.now() - 80000).toISOString())`:                                "1 min ago",
		inexact: "",
	} {
		got := eval[string](b, `import('./format.js').then((f) => (`+js+`))`)
		if got != want {
			t.Errorf("%s is %q, want %q", js, got, want)
		}
	}
	for fix, want := range map[string]string{
		"ALTER TABLE public.a SET LOGGED": "ALTER TABLE public.a SET LOGGED",
		"`walpost run`":                   "walpost run",
		"`walpost dlq list` shows them; retry them when their cause is gone": "null",
		"run `walpost migrate up` as the tables' owner":                      "null",
		"GRANT CONNECT ON DATABASE ... TO the role of postgres.url":          "null",
		"set postgres.max_retained_wal below max_slot_wal_keep_size":         "null",
	} {
		if got := eval[string](b, fmt.Sprintf(`import('./views/doctor.js').then((d) => String(d.command(%q)))`, fix)); got != want {
			t.Errorf("the command of %q is %q, want %q", fix, got, want)
		}
	}
	b.fine()
}
