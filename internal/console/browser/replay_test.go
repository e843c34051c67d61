package browser

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
)

// testReplay has three rows published again: counted, confirmed, done.
func testReplay(t *testing.T, r *rig, address string) {
	r.until("rows are delivered", func() bool {
		var n int
		r.must(r.db.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL AND id IN (101, 102, 103)`).Scan(&n))
		return n == 3
	})
	b := r.newTab()
	b.open(address)
	b.wait(`document.querySelectorAll('.tile').length === 8`)
	b.view("replay")
	b.do(`document.querySelector('main input[name=ids]').focus()`)
	b.keys("101, 102 103", enter)
	b.wait(`document.querySelector('.result')?.innerText.includes('3 rows would be published again')`)
	b.tabTo("main button.primary", "Publish 3 rows again")
	b.keys(enter)
	b.wait(`document.querySelector('dialog.ask')?.innerText.includes('Publish 3 rows again?')`)
	b.keys(enter)
	b.waitFresh(`document.querySelector('tbody tr')?.innerText.includes('3 of 3') && document.querySelector('tbody tr').innerText.includes('done')`)
	b.keys("j", enter)
	b.wait(`document.querySelector('dialog')?.innerText.includes('row 101, row 102, row 103')`)
	b.keys(esc)
	// Rows of this type are delivered all the time: those that were counted are meant.
	b.do(`document.querySelector('main form').reset(); document.querySelector('main input[name=types]').focus()`)
	b.keys("customer.moved", enter)
	b.wait(`document.querySelector('.result')?.innerText.includes('customer.moved')`)
	counted := r.delivered("customer.moved")
	r.until("more rows are delivered", func() bool { return r.delivered("customer.moved") > counted })
	b.tabTo("main button.primary", "Publish")
	b.keys(enter)
	b.wait(`document.querySelector('dialog.ask')`)
	b.keys(enter)
	b.waitFresh(`document.querySelectorAll('tbody tr').length === 2 && !document.querySelector('.notice.bad') && document.querySelector('tbody tr').innerText.includes('done')`)
	b.fine()
}

// delivered is how many rows of a type are.
func (r *rig) delivered(eventType string) (n int) {
	r.t.Helper()
	r.must(r.db.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE event_type = $1 AND processed_at IS NOT NULL`, eventType).Scan(&n))
	return n
}

// testCancel cancels a replay while the relay publishes it. What is published stays, and no more comes.
func testCancel(t *testing.T, r *rig, address string) {
	const rows = 60_000 // a replay takes some seconds for them: at most 20,000 a second while other rows come
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'bulk', g, 'bulk.made', '{}' FROM generate_series(1, $1::int) g`, rows)
	r.until("they are delivered", func() bool { return r.delivered("bulk.made") == rows })
	b := r.newTab()
	b.open(address)
	b.view("replay")
	b.wait(`document.querySelector('main form button[type=submit]')?.disabled === false`) // it knows what may be changed
	b.do(`document.querySelector('main input[name=types]').focus()`)
	b.keys("bulk.made", enter)
	b.wait(`document.querySelector('.result')?.innerText.includes('60,000 rows would be published again')`)
	b.tabTo("main button.primary", "Publish 60,000 rows again")
	b.keys(enter)
	b.wait(`document.querySelector('dialog.ask')`)
	b.keys(enter)
	b.wait(`document.querySelector('td.c-act button')?.innerText === 'Cancel'`)
	b.tabTo("td.c-act button", "Cancel")
	b.keys(enter)
	b.wait(`/Cancel replay [0-9]+\?/.test(document.querySelector('dialog.ask')?.innerText)`)
	b.tabTo("dialog button", "Cancel the replay") // the other one has the focus
	r.until("the replay runs", func() bool { sent, _ := r.replayed(); return sent > 0 })
	b.keys(enter)
	b.waitFresh(`document.getElementById('toast').innerText.endsWith('is cancelled.') && document.querySelector('tbody tr').innerText.includes('cancelled') && !document.querySelector('td.c-act button')`)
	r.until("the relay has noticed it", func() bool { return !strings.Contains(r.status(), `"replay"`) })
	sent, state := r.replayed()
	if again := r.stored("events.bulk.made") - rows; state != "cancelled" || again < sent || again >= rows {
		t.Errorf("the replay is %s, has sent %d, and %d of %d rows are published again", state, sent, again, rows)
	}
	b.fine()
}

// replayed tells how far the newest replay has come.
func (r *rig) replayed() (sent int, state string) {
	r.t.Helper()
	r.must(r.db.QueryRow(r.t.Context(), `SELECT sent, state FROM outbox_replays ORDER BY replay_id DESC LIMIT 1`).Scan(&sent, &state))
	return sent, state
}

// stored is how many messages of a subject the stream has.
func (r *rig) stored(subject string) int {
	r.t.Helper()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	js, err := nc.JetStream()
	r.must(err)
	info, err := js.StreamInfo("EVENTS", &nats.StreamInfoRequest{SubjectsFilter: subject})
	r.must(err)
	return int(info.State.Subjects[subject])
}
