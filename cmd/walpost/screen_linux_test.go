package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
)

// hostile clears a screen, sets its title, reverses text and goes back to the start of the line.
const (
	hostile      = "\x1b[2J\x1b]0;title\a\u009b2J\u202e\x7f\rback"
	hostileShown = `\u001b[2J\u001b]0;title\u0007\u009b2J\u202e\u007f\u000dback`
)

// ours is what walpost itself tells a terminal; its line breaks are \r\n there.
var ours = regexp.MustCompile("\x1b\\[(0|31|33|34)m|\rreading the stream|\r\n")

// oneForm undoes that JSON and Go's %q have forms of their own.
var oneForm = strings.NewReplacer(`\\`, `\`, `\r`, `\u000d`, `\a`, `\u0007`, `\x1b`, `\u001b`, `\x7f`, `\u007f`)

// TestHostileOutput: whatever a row, a message, a server or a command line holds, every command shows it, and neither a
// pipe nor a terminal gets a control character.
func TestHostileOutput(t *testing.T) {
	pg, n := testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{})
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	for _, way := range []string{"pipe", "terminal"} {
		t.Run(way, func(t *testing.T) {
			o := newOffice(t, pg, n, "{table: public.outbox_messages}")
			o.walpost("migrate", "up")
			defer o.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
			shows := func(args ...string) { t.Helper(); o.shows(way, args...) }

			o.plantHostileRows()
			shows("run", "--log-format", "console")
			_, err := o.js.PublishMsg(t.Context(), &nats.Msg{
				Subject: o.stream.Name + ".soon.other", Data: []byte(`"` + hostile + "\xff\""),
				Header: nats.Header{"ce-type": {url.PathEscape(hostile)}, "ce-subject": {url.PathEscape(hostile)}},
			})
			o.must(err)
			shows("tail", "--since", "1h")
			shows("tail", "--since", "1h", "--json")
			for _, args := range []string{"dlq list", "dlq list --json", "dlq show 1", "dlq show 1 --json", "dlq retry 1", "dlq retry 1 --json"} {
				shows(strings.Fields(args)...)
			}
			for _, args := range []string{
				"status", "status --json", "doctor", "doctor --json", "dlq list", "verify", "verify --json", "retention", "slot show", "slot create",
				"slot drop", "migrate up", "migrate status", "bench", "run --log-format console", "run --log-format json",
			} {
				shows(append(strings.Fields(args), "--postgres-url", o.hostileURL())...)
			}
			shows("dlq", "show", hostile)
			shows("status", "--"+hostile)
			shows("status", "--source", hostile, "--nats-url", hostile)
			o.exec(`DROP PUBLICATION walpost`)
			o.exec(`CREATE EVENT TRIGGER boom ON ddl_command_start EXECUTE FUNCTION ddl_boom()`)
			shows("migrate", "up")
		})
	}
}

// plantHostileRows: one that cannot be delivered, and a dead letter whose retry a trigger refuses.
func (o *office) plantHostileRows() {
	raise := fmt.Sprintf(`BEGIN RAISE EXCEPTION USING MESSAGE = U&'%s'; END`, unicodeSQL(hostile))
	o.exec(`CREATE FUNCTION boom() RETURNS trigger LANGUAGE plpgsql AS $$` + raise + `$$`)
	o.exec(`CREATE FUNCTION ddl_boom() RETURNS event_trigger LANGUAGE plpgsql AS $$` + raise + `$$`)
	_, err := o.conn.Exec(o.t.Context(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 1, $1, '{}')`, hostile)
	o.must(err)
	o.exec(`CREATE TRIGGER boom BEFORE INSERT ON outbox_messages EXECUTE FUNCTION boom()`)
	_, err = o.conn.Exec(o.t.Context(), `INSERT INTO outbox_messages_dlq (outbox, row_id, original, event_type, aggregate_type, attempts, last_error)
		SELECT 'public.outbox_messages', id, to_json(o), $1, $1, 1, $1 FROM outbox_messages o`, hostile)
	o.must(err)
}

// unicodeSQL is the body of a U&” literal.
func unicodeSQL(s string) (out string) {
	for _, r := range s {
		out += fmt.Sprintf(`\%04X`, r)
	}
	return out
}

// hostileURL names a database that is not there: the server's error quotes it.
func (o *office) hostileURL() string {
	u, err := url.Parse(o.conn.Config().ConnString())
	o.must(err)
	u.Path = "/" + hostile
	return u.String()
}

// shows runs a command until it has shown the hostile text, and looks at all that it wrote.
func (o *office) shows(way string, args ...string) {
	o.t.Helper()
	var text output
	var w io.Writer = &text
	closed := func() {}
	if way == "terminal" {
		master, terminal := pty(o.t, 4000)
		copied := make(chan struct{})
		go func() {
			_, _ = io.Copy(&text, master) // which ends with EIO
			close(copied)
		}()
		w, closed = terminal, func() {
			_ = terminal.Close() // perhaps again
			<-copied
		}
	}
	ctx, cancel := context.WithCancel(o.t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		execute(ctx, append(slices.Clone(args), "--config", o.config), w, w)
		close(ended)
	}()
	defer closed()
	o.eventually(fmt.Sprintf("walpost %q shows it: %q", args, text.lines()), func() bool {
		select {
		case <-ended:
			return true
		default:
			return text.has("back")
		}
	})
	cancel()
	<-ended
	closed()
	got := strings.Join(append(text.lines(), ""), "\n")
	if way == "terminal" {
		got = ours.ReplaceAllString(got, "\n")
	}
	o.checkShown(args, got, slices.Contains(args, "--json"))
}

func (o *office) checkShown(args []string, got string, asJSON bool) {
	o.t.Helper()
	if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && r != '\t' && hidden(r) }); i >= 0 {
		o.t.Errorf("walpost %q wrote %q of %q", args, got[i:min(len(got), i+10)], got)
	}
	if !strings.Contains(oneForm.Replace(got), hostileShown) {
		o.t.Errorf("walpost %q does not show it: %q", args, got)
	}
	if first, _, _ := strings.Cut(got, "\n"); asJSON && strings.HasPrefix(first, "{") && len(first) > 1 && !json.Valid([]byte(first)) {
		o.t.Errorf("walpost %q wrote no JSON: %q", args, got)
	}
}
