package browser

import (
	"strings"
	"testing"
)

// testOverview: what stands in two places is the same, and the sessions tell how the relay came to stream.
func testOverview(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.plot canvas').length === 6`)
	const wal = `[[...document.querySelectorAll('.tile')].at(-1).querySelector('.value').innerText, [...document.querySelectorAll('.chart')].find((c) => /WAL/.test(c.innerText)).querySelector('b').innerText]`
	for range 30 {
		if shown := eval[[]string](b, wal); shown[0] != shown[1] {
			t.Errorf("the retained WAL is %s in its tile, and %s in its chart", shown[0], shown[1])
		}
		b.do(`new Promise((done) => setTimeout(done, 200))`)
	}
	if text := b.text("main tbody"); !containsAll(text, "mode_changed the mode changes: the slot has been created", "it runs") {
		t.Errorf("the sessions are %q", text)
	}

	long := eval[[]float64](b, `(() => {
		const v = document.querySelector('#version')
		v.firstChild.textContent = 'v1.12.1-0.20261126052347-bc9071b12345+dirty'
		return [v.scrollWidth - v.clientWidth, v.scrollHeight - v.clientHeight, document.querySelector('#top').clientHeight - v.clientHeight]
	})()`)
	if long[0] > 0 || long[1] > 0 || long[2] < 0 {
		t.Errorf("a long version is cut: %v", long)
	}
	b.view("alarms")
	if text := b.text("main"); strings.Contains(text, "lost slot") {
		t.Errorf("a lost slot is no alarm, and the page says %q", text)
	}
	b.fine()
}

// testLate: a row waits behind one that cannot be sent. The page says so, and what to do.
func testLate(t *testing.T, r *rig, address string) {
	const failure = `subject: event_type "late paid": want printable ASCII`
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, attempts, last_error)
		SELECT 3, 'late', 1, 'late paid', '{}', CASE g WHEN 0 THEN now() + interval '3 hours' ELSE now() - interval '80 seconds' END, 1 - g,
			CASE g WHEN 0 THEN $1 ELSE 'held: an earlier row of the aggregate failed' END FROM generate_series(0, 1) g`, failure)
	defer r.exec(`DELETE FROM outbox_messages WHERE aggregate_type = 'late'`)
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.plot canvas').length === 6`)
	b.wait(`/^The oldest row has waited for [1-9] min( [0-9]+ s)?\. [0-9]+ rows cannot be sent, and [0-9]+ rows wait behind\. Nothing is lost\./.test(document.querySelector('.verdict.warn')?.innerText)`)
	if text := b.text(".verdict p"); !strings.HasPrefix(text, "too_large: ") && text != failure {
		t.Errorf("the cause is %q", text)
	}
	// The labels of the axes as they are drawn: those of the lag have seconds.
	b.do(`window.drawn = new Set(); const fill = CanvasRenderingContext2D.prototype.fillText; CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) { drawn.add(text); return fill.call(this, text, ...rest) }`)
	r.exec(`UPDATE outbox_messages SET available_at = now() - interval '80 seconds' WHERE aggregate_type = 'late' AND attempts = 0`)
	b.wait(`drawn.has('30 s') && drawn.has('1 min') && drawn.has('1 min 30 s')`)
	b.notCut(".tile .value")

	b.tabTo(".verdict a", "Held aggregates")
	b.keys(enter)
	b.wait(`location.hash === '#/held' && [...document.querySelectorAll('tbody tr')].some((r) => r.innerText.includes('late paid'))`)
	b.do(`[...document.querySelectorAll('tbody tr')].find((r) => r.innerText.includes('late paid')).click()`)
	b.wait(`document.querySelector('dialog .fix')`)
	if text := b.text("dialog"); !containsAll(text, failure, "correct the producer, insert a new event, and discard this one when it is a dead letter", "becomes a dead letter if that fails") {
		t.Errorf("the opened row says %q", text)
	}
	b.do(`navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve() }`)
	b.tabTo("dialog .fix button", "Copy")
	b.keys(enter)
	var id string
	r.must(r.db.QueryRow(t.Context(), `SELECT id::text FROM outbox_messages WHERE aggregate_type = 'late' AND attempts = 1`).Scan(&id))
	if copied := eval[string](b, `window.copied`); copied != "walpost dlq give-up "+id {
		t.Errorf("the command of row %s is %q", id, copied)
	}
	b.keys(esc)
	b.fine()
}
