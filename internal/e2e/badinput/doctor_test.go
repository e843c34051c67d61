package badinput

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/check"
)

// diagnosis is what doctor finds.
type diagnosis struct {
	err            error
	stdout, stderr bytes.Buffer
	Findings       check.Findings `json:"findings"`
}

func diagnose(ctx context.Context, s *site, dir string, env []string) (d diagnosis) {
	cmd := exec.CommandContext(ctx, s.program, "doctor", "--json")
	cmd.Dir, cmd.Env = dir, env
	cmd.Stdout, cmd.Stderr = &d.stdout, &d.stderr
	if d.err = cmd.Run(); d.stdout.Len() > 0 {
		d.err = errors.Join(d.err, json.Unmarshal(d.stdout.Bytes(), &d))
	}
	return d
}

func (d *diagnosis) exitCode() int {
	var exit *exec.ExitError
	if errors.As(d.err, &exit) {
		return exit.ExitCode()
	}
	return 0
}

// has reports whether something was found, as "level code".
func (d *diagnosis) has(want string) bool {
	level, code, _ := strings.Cut(want, " ")
	return slices.ContainsFunc(d.Findings, func(f check.Finding) bool { return string(f.Level) == level && f.Code == code })
}

func (d *diagnosis) errors() (n int) {
	for _, f := range d.Findings {
		if f.Level == check.Error {
			n++
		}
	}
	return n
}

// startCodes are the codes under which doctor has what a start refuses, by the cases' names.
var startCodes = map[string]string{
	"silent_server": "pg-unreachable", "nobody_listens": "pg-unreachable", "tls_wanted": "pg-unreachable", "broker_as_server": "pg-unreachable",
	"unknown_database": "pg-unreachable", "unknown_role": "pg-unreachable", "wrong_password": "pg-unreachable", "no_password": "pg-unreachable",
	"no_hba_line": "pg-unreachable", "no_connect": "pg-unreachable", "not_utf8": "pg-encoding", "standby": "pg-standby", "wal_level": "pg-wal-level",
	"wal_level_none": "table-needs-wal", "no_free_slot": "pg-no-free-slot", "no_walsenders": "pg-max-wal-senders", "no_replication": "pg-role-replication",
	"pooler_strict": "pg-unreachable", "pooler_transaction": "pg-pooler", "pooler_round_robin": "pg-pooler", "pooler_session": "pg-replication-connection",
	"pooler_session_lenient": "pg-replication-connection", "role_set": "pg-role-set",

	"no_usage": "table-schema", "no_grants": "table-privileges", "no_select": "table-privileges", "no_update": "table-privileges", "no_delete": "table-privileges",
	"no_lock": "table-privileges", "no_journal": "table-privileges", "no_letters": "table-privileges", "no_letters_none": "table-privileges", "no_dead_letters": "table-dead-letters-missing",
	"row_security": "table-row-security", "table_missing": "table-missing", "table_misspelt": "table-missing", "not_migrated": "table-missing", "table_is_view": "table-kind",
	"table_unlogged": "table-unlogged", "columns_missing": "table-columns", "available_at_text": "table-column-type", "processed_at_boolean": "table-column-type",
	"initial_unsaid": "table-initial", "id_without_index": "table-id-index",
	"append_only": "table-append-only", "journal_missing": "table-journal-missing", "ids_again": "table-ids-again",
	"other_marks": "table-other-marks", "journaled_marks": "table-other-marks", "dated_marks": "table-other-marks",
	"refuses_update": "table-refuses-update", "replica_identity": "table-replica-identity", "other_name": "table-other-name", "no_known": "table-known-privileges",
	"generated": "table-generated-column", "layout_without_column": "table-columns", "status_missing": "table-columns", "header_missing": "table-columns",
	"status_type": "table-status", "status_without_default": "table-status",
	"where_broken": "table-where", "where_column": "table-where", "where_no_condition": "table-where", "where_two": "table-where",
	"where_subquery": "table-where", "where_function": "table-where", "where_unpublished": "publication-filter", "where_other": "publication-filter",

	"no_publication": "publication-missing", "no_inserts": "publication-inserts", "another_table": "publication-tables", "row_filter": "publication-filter",
	"column_list": "publication-columns", "leaves": "publication-partitions", "all_tables_leaves": "publication-partitions",
	"slot_elsewhere": "slot-foreign", "slot_physical": "slot-foreign",
	"slot_plugin": "slot-foreign", "slot_two_phase": "slot-foreign", "slot_new_taken": "slot-unfinished",

	"noinfo": "stream-unreadable", "noinbox": "stream-unreadable", "nocreate": "stream-create-denied", "no_broker": "nats-unreachable", "server_as_broker": "nats-unreachable",
	"anonymous": "nats-unreachable", "wrong_secret": "nats-unreachable", "no_password_file": "nats-unreachable", "bad_creds": "nats-unreachable",
	"no_creds": "nats-unreachable", "bad_nkey": "nats-unreachable", "bad_ca": "nats-unreachable", "no_tls": "nats-unreachable",
	"jetstream_disabled": "nats-no-jetstream", "account_without_jetstream": "nats-no-jetstream", "unknown_domain": "nats-no-jetstream",
	"account_full": "stream-account-full",

	"stream_missing": "stream-missing", "stream_missing_marked": "stream-gone", "stream_missing_slot": "stream-gone", "other_subjects": "stream-subjects",
	"subjects_taken": "stream-subjects-taken", "subject_everything": "stream-subject-all", "sealed": "stream-sealed", "no_ack": "stream-no-ack",
	"persist_async": "stream-persist-async", "interest": "stream-interest", "workqueue": "stream-workqueue", "per_subject": "stream-per-subject-limit",
	"few_messages": "stream-few-messages", "message_ttl": "stream-ttl", "mirror": "stream-mirror", "sources": "stream-sources",
}

// inOtherWords are the cases in which only JetStream's answer to the creation of the
// stream has a start's words.
var inOtherWords = []string{"nocreate", "account_full", "subjects_taken"}

// verdict is how a start ends its words about a stream.
var verdict = regexp.MustCompile(`^check stream \S+: (.*) \[\S+\]$`)

// agree holds doctor to what the start said: it refuses the same, in the same words, and
// ends with the same exit code. Only what is no server's business is not its own.
func (c *badStart) agree(t *testing.T, o outcome, run *exec.ExitError) {
	t.Helper()
	d := &o.doctor
	if c.name == "port_in_use" {
		return
	}
	if c.waits {
		if d.exitCode() != 1 {
			t.Errorf("doctor ends with %v where run waits\n%s%s", d.err, &d.stdout, &d.stderr)
		}
		c.sameWords(t, d, waited(o.stderr.String()))
		return
	}
	if run == nil || d.exitCode() != run.ExitCode() {
		t.Errorf("doctor ends with %v, run with %v\n%s%s", d.err, run, &d.stdout, &d.stderr)
		return
	}
	if run.ExitCode() == 2 {
		if spoken(o.stderr.String()) != d.stderr.String() {
			t.Errorf("doctor says\n%s\nrun says\n%s", &d.stderr, &o.stderr)
		}
		return
	}
	c.sameWords(t, d, spoken(o.stderr.String()))
}

func (c *badStart) sameWords(t *testing.T, d *diagnosis, said string) {
	t.Helper()
	if want := "error " + startCodes[c.name]; !d.has(want) {
		t.Errorf("doctor has no %s:\n%s", want, &d.stdout)
	}
	if slices.Contains(inOtherWords, c.name) {
		return
	}
	text, fix, _ := strings.Cut(said, "\n")
	text, fix = strings.TrimPrefix(text, "error: "), strings.TrimPrefix(strings.TrimSpace(fix), "hint: ")
	if m := verdict.FindStringSubmatch(text); m != nil {
		text = m[1]
	}
	same := func(f check.Finding) bool {
		return f.Level == check.Error && strings.HasSuffix(vary(f.Text), vary(text)) && f.Fix == fix
	}
	if !slices.ContainsFunc(d.Findings, same) {
		t.Errorf("doctor does not say what run says: %s\n%s\n%s", text, fix, &d.stdout)
	}
}

func vary(s string) string {
	for _, v := range varying {
		s = v.of.ReplaceAllString(s, v.is)
	}
	return s
}

// documented are the codes of the table in the operator's handbook, and those of the
// stream's checks.
func documented(t *testing.T) (codes []string) {
	t.Helper()
	text, err := os.ReadFile("../../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, doctor, _ := strings.Cut(string(text), "\n## Doctor\n")
	doctor, _, _ = strings.Cut(doctor, "\n## ")
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|").FindAllStringSubmatch(doctor, -1) {
		codes = append(codes, m[1])
	}
	if len(codes) < 60 {
		t.Fatalf("the handbook has only %d codes", len(codes))
	}
	return codes
}
