package browser

import (
	"net/url"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

var views = []string{"overview", "slot", "held", "dead-letters", "tail", "consumers", "replay", "alarms", "doctor"}

// TestConsole shares one relay: what a browser does costs it nothing.
func TestConsole(t *testing.T) {
	chromium(t)
	r := newRig(t)
	r.seed()
	address := r.startUI()
	for _, part := range []struct {
		name string
		test func(*testing.T, *rig, string)
	}{
		{"Token", testToken},
		{"Views", testViews},
		{"Narrow", testNarrow},
		{"Phone", testPhone},
		{"Units", testUnits},
		{"Overview", testOverview},
		{"ReadOnly", testReadOnly},
		{"Replay", testReplay},
		{"Cancel", testCancel},
		{"Screenshots", testScreenshots},
		{"Late", testLate}, // its lag is for no picture
		{"Keyboard", testKeyboard},
		{"Tail", testTail},
		{"Hostile", testHostile},
		{"Outage", testOutage},
		{"Alarm", testAlarm},
		{"Away", testAway},
		{"Many", testMany}, // last: a session with so many held rows begins slowly
	} {
		t.Run(part.name, func(t *testing.T) {
			outer := r.t
			r.t = t
			defer func() { r.t = outer }()
			part.test(t, r, address)
		})
	}
}

// seed has a few rows that fail.
func (r *rig) seed() {
	r.t.Helper()
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 3, 'order', 4200 + g, 'order placed', '{"total": 1250, "currency": "EUR", "big": 12345678901234567890.10}' FROM generate_series(1, 12) g`)
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, attempts, last_error)
		SELECT 3, 'invoice', 70 + g / 3, 'invoice.created', '{}', now() + interval '3 hours', (g + 1) % 3,
			CASE WHEN g = 6 THEN 'too_large: ' || repeat('the message has 1203441 bytes, the server takes 1048576; ', 11) || 'the end'
				WHEN g % 3 = 0 THEN 'too_large: the message has 1203441 bytes, the server takes 1048576' ELSE 'held: an earlier row of the aggregate failed' END
		FROM generate_series(0, 8) g`)
	r.until("rows become dead letters", func() bool {
		var n int
		r.must(r.db.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages_dlq`).Scan(&n))
		return n == 12
	})
}

func testToken(t *testing.T, r *rig, address string) {
	b := r.newTab()
	plain, token, _ := strings.Cut(address, "#token=")
	b.open(plain)
	b.wait(`document.querySelector('form.token')`)
	if text := b.text("main"); strings.Contains(text, "Streaming") {
		t.Errorf("without its token the console shows %q", text)
	}
	if text := b.text("form.token"); b.count("form.token .notice") > 0 || !strings.Contains(text, "walpost ui") {
		t.Errorf("before anything was typed the page says %q", text)
	}
	b.open(plain + "#token=" + url.QueryEscape("not-the-token-at-all"))
	b.wait(`document.querySelector('form.token .notice.bad')?.innerText.includes('missing or wrong')`)
	if apart := eval[float64](b, `document.querySelector('form.token .notice').getBoundingClientRect().x - document.querySelector('form.token input').getBoundingClientRect().x`); apart != 0 {
		t.Errorf("the error stands %g px beside the field", apart)
	}
	b.do(`document.querySelector('form.token input').focus()`)
	b.keys(token, enter)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	b.fine("401")

	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	if shown := eval[string](b, "location.href"); strings.Contains(shown, token) {
		t.Errorf("the address bar keeps the token: %s", shown)
	}
	b.fine()
}

// testViews: no view has an error, breaks the content security policy, or asks another host.
func testViews(t *testing.T, r *rig, address string) {
	b := r.newTab()
	for _, scheme := range []string{"light", "dark"} {
		b.colours(scheme)
		b.open(address)
		b.wait(`document.querySelectorAll('.tile').length === 8 && document.querySelectorAll('.plot canvas').length === 6`)
		for _, view := range views {
			b.view(view)
			b.fine()
			for _, faint := range eval[[]string](b, contrast) {
				t.Errorf("%s, %s: too little contrast: %s", view, scheme, faint)
			}
			for _, nameless := range eval[[]string](b, names) {
				t.Errorf("%s: no name for screen readers: %s", view, nameless)
			}
			if n := b.count(".notice.bad"); n > 0 {
				t.Errorf("%s shows a problem: %s", view, b.text(".notice.bad"))
			}
		}
		b.part(t, "Doctor "+scheme, func() { doctorStays(b) })
	}
	own, _, _ := strings.Cut(address, "#")
	for _, asked := range b.asked() {
		if !strings.HasPrefix(asked, own) && !strings.HasPrefix(asked, "data:") && asked != "about:blank" {
			t.Errorf("the page asks %s", asked)
		}
	}
}

// doctorStays: the last check is still there after the reader was elsewhere.
func doctorStays(b *browser) {
	if n := b.count(".finding"); n != 0 {
		b.t.Errorf("a new page shows %d findings", n)
	}
	b.tabTo("button", "Check both servers")
	b.keys(enter)
	b.wait(`document.querySelector('.finding')`)
	if wrong := eval[[]string](b, `[...document.querySelectorAll('.fix')].filter((f) => !!f.querySelector('code') !== !!f.querySelector('button')).map((f) => f.innerText)`); len(wrong) > 0 || b.count(".fix") == 0 {
		b.t.Errorf("of %d fixes these have a button and are no command, or the other way round: %q", b.count(".fix"), wrong)
	}
	checked := eval[string](b, `document.querySelector('.summary').innerText.match(/checked at [0-9:]+ UTC/)[0]`)
	b.view("slot")
	b.view("doctor")
	if b.count(".finding") == 0 || !strings.Contains(b.text(".summary"), checked) {
		b.t.Errorf("what was %s is gone: %s", checked, b.text("main"))
	}
}

// contrast names the texts with less contrast than WCAG's AA asks for: 4.5, and 3 for large text.
const contrast = `(() => {
	const parse = (c) => c.match(/[\d.]+/g).map(Number)
	const light = ([r, g, b]) => {
		const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
		return 0.2126 * x + 0.7152 * y + 0.0722 * z
	}
	const behind = (el) => {
		for (; el; el = el.parentElement) {
			const c = parse(getComputedStyle(el).backgroundColor)
			if ((c[3] ?? 1) > 0.9) return c
		}
		return [255, 255, 255]
	}
	const faint = new Set()
	for (const el of document.querySelectorAll('body *')) {
		const text = [...el.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join('')
		if (!text || !el.checkVisibility() || el.closest(':disabled, noscript, .skip')) continue
		const style = getComputedStyle(el), pair = [light(parse(style.color)), light(behind(el))].sort((a, b) => b - a)
		const ratio = (pair[0] + 0.05) / (pair[1] + 0.05), large = parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 600
		if (ratio < (large ? 3 : 4.5)) faint.add(el.className + ' ' + JSON.stringify(text.slice(0, 30)) + ' ' + ratio.toFixed(1))
	}
	return [...faint]
})()`

// names lists what can be operated and has no name.
const names = `[...document.querySelectorAll('button, a, input, select, meter, [role=img], [role=region]')]
	.filter((el) => el.checkVisibility() && !(el.innerText?.trim() || el.getAttribute('aria-label') || el.closest('label')?.innerText.trim()))
	.map((el) => el.outerHTML.slice(0, 100))`

// testNarrow: from a phone to a wall screen, nothing is wider than the screen.
func testNarrow(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	for _, width := range testenv.Some[int64](t, 3, 360, 390, 700, 861, 1280, 2560) { // a phone, a middle and a large one
		b.size(width, 900)
		for _, view := range views {
			b.view(view)
			if wide := eval[int64](b, "document.documentElement.scrollWidth"); wide > width {
				t.Errorf("%s is %d px wide on a screen of %d", view, wide, width)
			}
		}
	}
	b.fine()
}

// testReadOnly: the relay's own console has no token here, and changes nothing.
func testReadOnly(t *testing.T, r *rig, _ string) {
	b := r.newTab()
	b.open("http://" + r.address + "/ui/#/dead-letters")
	b.wait(`document.querySelectorAll('tbody tr').length === 12`)
	b.keys("j", "j", " ")
	b.wait(`document.querySelectorAll('tr[aria-selected=true]').length === 1`)
	if n := b.count("main button.primary:disabled, main button.danger:disabled"); n != 2 {
		t.Errorf("%d of 2 actions are disabled", n)
	}
	b.wait(`document.querySelector('main').innerText.includes('http.token_file')`) // the overview says so, which may come later
	b.keys(enter)
	b.wait(`document.querySelector('dialog')?.innerText.includes('http.token_file (WALPOST_HTTP_TOKEN_FILE) to see payloads')`)
	b.keys(esc)
	b.view("tail")
	b.wait(`document.querySelectorAll('tbody tr').length > 1 && document.querySelector('main').innerText.includes('to see payloads')`)
	b.fine()
}

// testOutage: one sentence says that JetStream is away, and what that means.
func testOutage(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	r.must(r.nats.Kill())
	b.wait(`/^JetStream has been away for [0-9]+.* rows wait/.test(document.querySelector('.verdict.bad')?.innerText)`)
	// Where the header says so, no session looks well.
	b.wait(`/delivers nothing now: ./.test(document.querySelector('main tbody').innerText)`)
	for range 20 {
		if text := eval[string](b, `document.querySelector('#state').innerText.startsWith('Waiting') && document.querySelector('main tbody .badge.good')?.closest('tr').innerText || ''`); text != "" {
			t.Errorf("the relay waits, and a session is %q", text)
			break
		}
		b.do(`new Promise((done) => setTimeout(done, 100))`)
	}
	if text := b.text(".verdict"); !containsAll(text, "Nothing is lost") {
		t.Errorf("the page says %q", text)
	}
	if *update {
		b.wait(`/been away for [2-9][0-9] s/.test(document.querySelector('.verdict').innerText)`)
		b.size(1280, 720)
		b.picture("jetstream-away")
	}
	r.must(r.nats.Start(t.Context()))
	b.wait(`!document.querySelector('.verdict')`)
	for _, width := range []int64{390, 1180} {
		b.size(width, 900)
		b.waitFresh(`[...document.querySelectorAll('td.c-long')].some((e) => e.innerText.includes('nats_away'))`)
		b.notCut("td.c-long")
	}
	b.fine()
}

// testAlarm: another writer publishes into the relay's stream.
func testAlarm(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	r.must(nc.Publish("events.order.placed", []byte("{}")))
	r.must(nc.Flush())
	b.wait(`document.querySelector('.verdict.warn')?.innerText.includes('Alarm foreign_message')`)
	b.wait(`document.querySelector('#nav .count.warn') && document.querySelector('#nav a[href="#/alarms"]').innerText.includes('1')`)
	b.tabTo(".verdict a", "")
	b.keys(enter)
	b.wait(`location.hash === '#/alarms' && document.querySelector('tbody tr')?.innerText.includes('foreign_message')`)
	if runbook := eval[string](b, `document.querySelector('td.c-act a').getAttribute('href')`); runbook != "docs/ALARMS.html#foreign_message" {
		t.Errorf("the runbook is at %s", runbook)
	}
	if *update {
		b.size(1280, 480)
		b.wait(`document.querySelector('#state').innerText.includes('Streaming')`)
		b.picture("alarms")
	}
	b.fine()
}

// testAway: a page whose server is away says so, and goes on by itself.
func testAway(t *testing.T, r *rig, _ string) {
	b := r.newTab()
	b.open("http://" + r.address + "/ui/")
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	b.fine()
	r.must(r.relay.Kill())
	b.wait(`document.querySelector('.verdict')?.innerText.includes('has been away')`)
	r.startRelay()
	b.wait(`!document.body.classList.contains('away') && document.querySelector('#state').innerText.includes('Streaming')`)
	b.fine("ERR_CONNECTION", "net::ERR")
}
