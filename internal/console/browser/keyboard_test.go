package browser

import (
	"fmt"
	"testing"
)

// testKeyboard goes through the views and changes dead letters without a mouse.
func testKeyboard(t *testing.T, r *rig, address string) {
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	for i, view := range views {
		b.keys(fmt.Sprint(i + 1))
		b.wait(`location.hash === '#/` + view + `' && document.querySelector('main h1')`)
	}
	b.keys("?")
	b.wait(`document.querySelector('dialog[open]')?.innerText.includes('Dead letters')`)
	b.keys(esc)
	b.wait(`!document.querySelector('dialog')`)
	for _, theme := range []string{"light", "dark", ""} {
		b.keys("t")
		b.wait(fmt.Sprintf(`(document.documentElement.dataset.theme ?? '') === '%s'`, theme))
	}
	b.keys("g", "d")
	b.wait(`document.querySelectorAll('tbody tr').length === 12`)

	b.part(t, "Retry", func() { retryByKeyboard(r, b) })
	b.part(t, "Discard", func() { discardByKeyboard(r, b) })
	b.fine()
}

func (r *rig) deadLetters() (n, newest int64) {
	r.t.Helper()
	r.must(r.db.QueryRow(r.t.Context(), `SELECT count(*), coalesce(max(dead_letter_id), 0) FROM outbox_messages_dlq`).Scan(&n, &newest))
	return n, newest
}

// retryByKeyboard opens the second row. Its event type is not valid, so that it comes back under a new number.
func retryByKeyboard(r *rig, b *browser) {
	_, before := r.deadLetters()
	b.tabTo(".table", "")
	b.keys(down, down)
	b.keys(enter)
	b.wait(`document.querySelector('dialog pre')?.innerText.includes('12345678901234567890.10')`)
	b.tabTo("dialog button.primary", "Retry")
	b.keys(enter)
	b.wait(`document.querySelector('dialog.ask')?.innerText.includes('Retry 1 dead letter?')`)
	if text := b.text("dialog.ask"); !containsAll(text, "1", "order placed", "the relay tries them again", "1 of 1: a retry fails again, because the row stays as it is: correct the producer") {
		b.t.Errorf("the confirmation does not name count and type: %q", text)
	}
	b.keys(enter)
	b.wait(`document.getElementById('toast').innerText === 'Put back: 1 dead letter' && !document.querySelector('dialog')`)
	r.until("the dead letter is retried and fails again", func() bool {
		n, newest := r.deadLetters()
		return n == 12 && newest > before
	})
	b.waitFresh(`[...document.querySelectorAll('main button')].some((b) => b.innerText.startsWith('There are new dead letters'))`)
	b.tabTo("main button", "There are new dead letters")
	b.keys(enter)
	b.wait(`document.querySelectorAll('tbody tr').length === 12 && !document.querySelector('button.news')`)
}

func discardByKeyboard(r *rig, b *browser) {
	b.tabTo(".table", "")
	b.keys(down, " ", down, " ")
	b.wait(`document.querySelectorAll('tr[aria-selected=true]').length === 2`)
	ask := func() {
		b.tabTo("main button.danger", "Discard 2")
		b.keys(enter)
		b.wait(`document.querySelector('dialog.ask')?.innerText.includes('Discard 2 dead letters?')`)
	}
	ask()
	b.keys(enter) // Cancel has the focus
	b.wait(`!document.querySelector('dialog')`)
	if n, _ := r.deadLetters(); n != 12 {
		b.t.Errorf("after Cancel there are %d dead letters", n)
	}
	ask()
	b.tabTo("dialog button", "Discard 2 dead letters")
	b.keys(enter)
	b.wait(`document.getElementById('toast').innerText === 'Discarded: 2 dead letters' && document.querySelectorAll('tbody tr').length === 10`)
	if n, _ := r.deadLetters(); n != 10 {
		b.t.Errorf("after the discard there are %d dead letters", n)
	}
}
