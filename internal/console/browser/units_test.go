package browser

import (
	"regexp"
	"strings"
	"testing"
)

var binary = regexp.MustCompile(`[KMGT]iB`)

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
	} {
		got := eval[string](b, `import('./format.js').then((f) => (`+js+`))`)
		if got != want {
			t.Errorf("%s is %q, want %q", js, got, want)
		}
	}
	b.fine()
}
