package browser

import (
	"fmt"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// testTail: the live tail keeps 500 lines, and stands still while it is paused.
func testTail(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.view("tail")
	b.wait(`document.querySelectorAll('tbody tr').length > 0`)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.paid', '{}' FROM generate_series(1, 1000) g`)
	b.wait(`document.querySelectorAll('tbody tr').length === 500`)
	b.keys("p")
	b.wait(`document.querySelector('button[aria-pressed=true]')?.innerText === 'Go on'`)
	first := b.text("tbody tr")
	b.wait(`/[1-9][0-9]* new/.test(document.querySelector('.title').innerText)`)
	if still := b.text("tbody tr"); first != still {
		t.Errorf("while it is paused the first line changes from %q to %q", first, still)
	}
	b.keys("p")
	b.wait(`!document.querySelector('main button[aria-pressed=true]')`)
	b.do(`document.querySelector('main input').focus()`)
	b.keys("order.paid", enter)
	b.wait(`document.querySelectorAll('tbody tr').length > 20 && [...document.querySelectorAll('tbody tr')].every((r) => r.innerText.includes('order.paid'))`)
	b.fine()
}

// testMany: the page has few elements and asks few questions, however much there is. A hidden tab asks none.
func testMany(t *testing.T, r *rig, address string) {
	r.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, original, tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, last_error)
		SELECT 'public.outbox_messages', g, json_build_object('id', g), 1, 'order', g, 'order.placed', '{}', 10, 'subject: not covered by the stream'
		FROM generate_series(20000000, 20000000 + $1::int) g`, testenv.Size(t, 1000, 10_000))
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, attempts, last_error)
		SELECT 9, 'parcel', g, 'parcel.sent', '{}', now() + interval '3 hours', 1, 'subject: not covered by the stream' FROM generate_series(1, $1::int) g`,
		testenv.Size(t, 10_000, 100_000))
	shown := r.hide(address)
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	paint := eval[float64](b, `performance.getEntriesByName('first-contentful-paint')[0].startTime`)
	t.Logf("first contentful paint after %.0f ms", paint)
	for view, most := range map[string]int{"dead-letters": 100, "held": 200} {
		b.view("doctor")
		begun := time.Now()
		b.view(view)
		b.wait(fmt.Sprintf(`document.querySelectorAll('tbody tr').length === %d`, most))
		t.Logf("%s: %d rows after %s", view, most, time.Since(begun).Round(time.Millisecond))
		if n := b.count("*"); n > 5000 {
			t.Errorf("%s has %d elements", view, n)
		}
		b.asked()
		b.do(`new Promise((done) => setTimeout(done, 3000))`)
		if asked := b.asked(); len(asked) > 10 {
			t.Errorf("%s asks %d questions in three seconds: %s", view, len(asked), asked)
		}
	}
	b.view("dead-letters")
	for page := 2; page <= 4; page++ {
		b.tabTo("main button", "Older")
		b.keys(enter)
		b.wait(fmt.Sprintf(`document.querySelector('.pages').innerText.includes('Page %d') && document.querySelectorAll('tbody tr').length === 100`, page))
	}
	b.fine("502") // a question that takes more than two seconds is given up, and asked again
	shown()
}

// hide opens a tab and hides it: it asks nothing until shown. After that it is up to date soon.
func (r *rig) hide(address string) (shown func()) {
	r.t.Helper()
	b := r.newTab()
	b.open(address)
	b.view("tail")
	b.wait(`document.querySelectorAll('tbody tr').length > 1`)
	show := func(hidden bool) {
		b.do(fmt.Sprintf(`Object.defineProperty(document, 'hidden', {value: %t, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))`, hidden))
	}
	show(true)
	for quiet := false; !quiet; quiet = len(b.asked()) == 0 { // what was asked before is answered
		b.do(`new Promise((done) => setTimeout(done, 1000))`)
	}
	before := b.text("tbody tr")
	return func() {
		if asked := b.asked(); len(asked) > 0 {
			r.t.Errorf("a hidden tab asks %s", asked)
		}
		if now := b.text("tbody tr"); now != before {
			r.t.Errorf("a hidden tab follows the stream: %q, then %q", before, now)
		}
		show(false)
		b.wait(fmt.Sprintf(`document.querySelector('tbody tr').innerText !== %q`, before))
		b.fine()
	}
}
