package browser

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// hostile are values of rows. None of them may do more than be shown in its own cell.
var hostile = []string{
	`<script>window.hit = 1</script>`,
	`<img src=x onerror="window.hit = 2">`,
	`</td></tr></table><svg onload="window.hit = 3">`,
	`"><iframe srcdoc="<script>parent.hit = 4</script>">`,
	`javascript:window.hit=5`,
	`<style>* { display: none !important }</style>`,
	"\x1b[31mred\x1b]0;title\x07\x1b[2J",
	"order\u202ederalcnac\u202c.\u2066paid",
	strings.Repeat("\u0301\u0302\u0303\u0304", 400) + "tall",
	strings.Repeat("wide", 5000),
	strings.Repeat("line\n", 200),
	"\u2028\u2029\ufeff\u00ad\u200b",
	`{{constructor.constructor("window.hit = 6")()}}`,
}

// shape is what the table's other parts are: they must not change. The sentence above the view comes and goes with the
// relay's state.
const shape = `JSON.stringify({
	heads: [...document.querySelectorAll('th')].map((x) => { const r = x.getBoundingClientRect(); return [r.x, r.width, r.height] }),
	nav: document.getElementById('nav').getBoundingClientRect().width,
	top: document.getElementById('top').getBoundingClientRect().height,
	title: document.querySelector('h1').getBoundingClientRect().y - document.getElementById('main').getBoundingClientRect().y,
})`

// rows are the heights of the rows and their numbers of elements, each once.
const rows = `[...new Set([...document.querySelectorAll('tbody tr')].map((r) => r.getBoundingClientRect().height + ' px, ' + r.querySelectorAll('*').length + ' elements'))]`

func testHostile(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	for _, view := range []string{"dead-letters", "held"} {
		b.part(t, view, func() { hostileTable(r, b, view) })
	}
	b.part(t, "details", func() { hostileDetails(b) })
	b.part(t, "tail", func() { hostileTail(r, b) })
	b.part(t, "replay", func() { manyTypes(r, b) })
	b.unhurt()
}

// unhurt: nothing of a row has become an element or has run.
func (b *browser) unhurt() {
	b.t.Helper()
	if hit := eval[string](b, `String(window.hit)`); hit != "undefined" {
		b.t.Errorf("a row's script has run: window.hit is %s", hit)
	}
	if n := b.count("main :is(script, img, iframe, svg, style, link, object), dialog :is(script, img, iframe, svg, style, link, object)"); n != 0 {
		b.t.Errorf("%d elements are a row's", n)
	}
	b.fine()
	for _, asked := range b.asked() {
		if strings.HasSuffix(asked, "/x") {
			b.t.Errorf("a row made the page ask %s", asked)
		}
	}
}

func hostileTable(r *rig, b *browser, view string) {
	b.view(view)
	b.wait(`document.querySelectorAll('tbody tr').length > 1`)
	before, sameBefore, n := eval[string](b, shape), eval[[]string](b, rows), b.count("tbody tr")
	large := testenv.Some(b.t, 3, hostile...) // the browser takes seconds to lay out such a payload
	for i, value := range hostile {
		if view == "held" {
			r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, attempts, last_error, occurred_at)
				VALUES (3, $1, $2, $1, '{}', now() + interval '3 hours', 1, $1, now() - interval '2 days')`, value, 9000+i)
		} else {
			size := 20_000
			if slices.Contains(large, value) {
				size = 1_000_000
			}
			r.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, original, tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, last_error)
				VALUES ('public.outbox_messages', $2, json_build_object('id', $3::bigint, 'event_type', $1::text, 'aggregate_type', $1::text, 'payload', to_jsonb(repeat($1, 1 + $4::int / length($1)))),
					3, $1, $3, $1, to_jsonb(repeat($1, 1 + $4::int / length($1))), 10, $1)`, value, fmt.Sprint(9_000_000+i), 9_000_000+i, size)
		}
	}
	b.view("doctor")
	b.view(view)
	// What was asked within the last second is answered from memory: then the page says that there are new ones.
	b.waitFresh(fmt.Sprintf(`document.querySelector('button.news')?.click() || document.querySelectorAll('tbody tr').length === %d`, n+len(hostile)))
	after, sameAfter := eval[string](b, shape), eval[[]string](b, rows)
	if before != after {
		b.t.Errorf("hostile rows move what is around them:\n%s\n%s", before, after)
	}
	if len(sameBefore) != 1 || fmt.Sprint(sameBefore) != fmt.Sprint(sameAfter) {
		b.t.Errorf("rows were %q, and are %q", sameBefore, sameAfter)
	}
	if text := b.text("tbody"); !containsAll(text, "␛[31mred", `order\u202ederalcnac\u202c`) {
		b.t.Error("control characters are not made visible")
	}
	b.unhurt()
}

// hostileDetails opens each of the newest dead letters.
func hostileDetails(b *browser) {
	b.view("dead-letters")
	for i := range hostile {
		b.do(fmt.Sprintf(`document.querySelectorAll('tbody tr')[%d].click()`, i))
		b.wait(`document.querySelector('dialog pre')`)
		shown := eval[int](b, `document.querySelector('dialog pre').textContent.length`)
		if shown < 10_000 || shown > 2<<20 {
			b.t.Errorf("%d characters of the payload are shown", shown)
		}
		b.unhurt()
		b.keys(esc)
		b.wait(`!document.querySelector('dialog')`)
	}
}

func hostileTail(r *rig, b *browser) {
	b.view("tail")
	b.wait(`document.querySelectorAll('tbody tr').length > 1`)
	before := eval[[]string](b, rows)
	for i, value := range hostile {
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, to_jsonb($1::text))`,
			value, 9100+i, fmt.Sprintf("hostile.type%d", i))
	}
	b.wait(`document.querySelector('main').innerText.includes('hostile.type12')`)
	after := eval[[]string](b, rows)
	if fmt.Sprint(before) != fmt.Sprint(after) {
		b.t.Errorf("rows were %q, and are %q", before, after)
	}
	b.unhurt()
}

// manyTypes: a request for rows of very many types shows the first of them.
func manyTypes(r *rig, b *browser) {
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'many', g, 'many.type' || g, '{}' FROM generate_series(1, 3000) g`)
	r.until("they are delivered", func() bool {
		var n int
		r.must(r.db.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE aggregate_type = 'many' AND processed_at IS NULL`).Scan(&n))
		return n == 0
	})
	b.view("replay")
	b.do(`document.querySelector('main input[name=aggregate]').focus()`)
	b.keys("many")
	r.until("rows that are delivered now are counted", func() bool {
		b.keys(enter)
		b.wait(`document.querySelector('.result')`)
		return strings.Contains(b.text(".result"), "3,000 rows would be published again")
	})
	if n := b.count(".bars meter"); n != 20 {
		b.t.Errorf("%d types are shown", n)
	}
}

func containsAll(text string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(text, p) {
			return false
		}
	}
	return true
}
