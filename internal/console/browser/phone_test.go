package browser

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
)

// notCut: no element has text beyond its edge, or beyond the screen's.
func (b *browser) notCut(selector string) {
	b.t.Helper()
	b.do(`Promise.all(document.getAnimations().map((a) => a.finished))`)
	cut := eval[[]string](b, fmt.Sprintf(`[...document.querySelectorAll(%q)].filter((e) => {
		const r = e.getBoundingClientRect()
		return !e.checkVisibility() || !r.width || r.right > innerWidth || e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight + 1
	}).map((e) => e.innerText)`, selector))
	if len(cut) > 0 || b.count(selector) == 0 {
		b.t.Errorf("%s is cut, or missing, on %d px: %q", selector, eval[int](b, "innerWidth"), cut)
	}
}

// tap touches the middle of an element.
func (b *browser) tap(selector string) {
	b.t.Helper()
	at := eval[struct{ X, Y float64 }](b, fmt.Sprintf(`(() => {
		const e = document.querySelector(%q); e.scrollIntoView({block: 'center'})
		const r = e.getBoundingClientRect(); return {X: r.x + r.width / 2, Y: r.y + r.height / 2}
	})()`, selector))
	for _, params := range []input.DispatchTouchEventParams{
		{Type: input.DispatchTouchEventTypeTouchStart, TouchPoints: []*input.TouchPoint{{X: at.X, Y: at.Y}}},
		{Type: input.DispatchTouchEventTypeTouchEnd, TouchPoints: []*input.TouchPoint{}},
	} {
		_, err := chromedp.Call(b.ctx, input.DispatchTouchEvent, params)
		b.must(err)
	}
}

// testPhone: a finger and a keyboard reach the whole error of a row.
func testPhone(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.size(390, 800)
	_, err := chromedp.Call(b.ctx, emulation.SetTouchEmulationEnabled, emulation.SetTouchEmulationEnabledParams{Enabled: true})
	b.must(err)
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	for view, end := range map[string]string{"held": "the end", "dead-letters": "and no empty token"} {
		b.part(t, view, func() {
			b.view(view)
			b.wait(`document.querySelectorAll('td.c-long .data').length >= 3`)
			if view == "dead-letters" { // their errors are short enough for the list
				b.notCut("td.c-long .data")
			}
			b.tap("tbody tr:last-child td.c-long")
			b.wholeError(end)
			b.do(`document.querySelector('tbody tr:last-child').focus()`)
			b.keys(enter)
			b.wholeError(end)
		})
	}
	b.fine()
}

// wholeError reads the error in the details of a row, up to its end, and closes them.
func (b *browser) wholeError(end string) {
	b.t.Helper()
	b.wait(`document.querySelector('dialog dt')?.innerText === 'Error'`)
	b.notCut("dialog dd")
	if text := b.text("dialog dd"); !strings.HasSuffix(text, end) {
		b.t.Errorf("the error is %q", text)
	}
	b.keys(esc)
	b.wait(`!document.querySelector('dialog')`)
}
