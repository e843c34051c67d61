package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
)

// Check reads the stream and judges it. Its error is [ErrStreamNotFound], one of
// the API, or the refusal, which names every finding of level [check.Error]. It changes nothing.
func (s *Stream) Check(ctx context.Context) (*StreamInfo, check.Findings, error) {
	info, err := s.Info(ctx)
	if err != nil {
		return nil, nil, err
	}
	found, err := s.Judge(info)
	return info, found, err
}

// Judge is [Stream.Check] of what has been read.
func (s *Stream) Judge(info *StreamInfo) (check.Findings, error) {
	found := judgeConfig(s.cfg, &info.Config, s.nc.MaxPayload())
	now := &judge{cfg: s.cfg, c: &info.Config}
	now.consumers(info.Consumers)
	found = append(found, now.Findings...)
	refused := refusal(s.cfg.Name, found)
	for i := range found {
		if found[i].Level == check.Error {
			found[i].Err = refused // a start names them all
		}
	}
	return found, refused
}

func refusal(stream string, found check.Findings) error {
	var texts, fixes []string
	for _, f := range found {
		if f.Level == check.Error {
			texts = append(texts, f.Text+" ["+f.Code+"]")
			fixes = append(fixes, f.Fix)
		}
	}
	if len(texts) == 0 {
		return nil
	}
	err := fmt.Errorf("check stream %s: %w", stream, errors.New(strings.Join(texts, "; ")))
	return hint.Wrap(err, strings.Join(fixes, "; "))
}

// judgeConfig is [Stream.Check] of a configuration at hand; maxPayload is the
// connection's.
func judgeConfig(cfg StreamConfig, c *jetstream.StreamConfig, maxPayload int64) check.Findings {
	j := &judge{cfg: cfg, c: c}
	j.refusals()
	j.writers()
	j.weaknesses()
	j.subjects()
	j.durability()
	j.limits(maxPayload)
	j.batches()
	return j.Findings
}

type judge struct {
	check.Findings
	cfg StreamConfig
	c   *jetstream.StreamConfig
}

func (j *judge) refuse(bad bool, code, text, fix string) {
	if bad {
		j.Fault(code, fix, "%s", text)
	}
}

func (j *judge) warn(bad bool, code, text, fix string) {
	if bad {
		j.Warning(code, fix, "%s", text)
	}
}

// weak is refused unless the operator accepted it.
func (j *judge) weak(bad bool, code, text, fix string) {
	fix += ", or set nats.accept_weak_stream: true and live without the proof that nothing was lost"
	j.refuse(bad && !j.cfg.AcceptWeak, code, text, fix)
	j.warn(bad && j.cfg.AcceptWeak, code, text, fix)
}

// refusals are streams whose PubAck is no promise, or that take no message.
func (j *judge) refusals() {
	const another = "create another stream and name it in nats.stream"
	j.refuse(j.c.PersistMode == jetstream.AsyncPersistMode, "stream-persist-async",
		"persist_mode is async: messages are acknowledged before they are written, and a crash loses them",
		another)
	j.refuse(j.c.NoAck, "stream-no-ack", "no_ack is set: nothing is ever acknowledged",
		"nats stream edit "+j.cfg.Name+" --ack")
	j.refuse(j.c.Sealed, "stream-sealed", "the stream is sealed", another)
	j.refuse(j.c.Mirror != nil, "stream-mirror", "the stream is a mirror: only its origin takes messages",
		"name the origin in nats.stream")
	j.refuse(j.c.AllowMsgCounter, "stream-counter",
		"allow_msg_counter is set: the stream takes counters only", another)
}

// writers are sources of messages that the relay does not know of.
func (j *judge) writers() {
	exclusive := !j.cfg.Shared
	const share = ", or set nats.shared: true"
	j.refuse(exclusive && len(j.c.Sources) > 0, "stream-sources",
		"the stream has sources, which write into the relay's own sequence", "remove the sources"+share)
	j.refuse(exclusive && j.c.AllowMsgSchedules, "stream-schedules",
		"allow_msg_schedules is set: the server itself writes into the relay's own sequence",
		"create another stream without schedules and name it in nats.stream"+share)
	j.refuse(j.cfg.Shared && j.c.Duplicates <= 0, "stream-no-duplicate-window",
		"the stream has no duplicate window, and a shared one has nothing else against duplicates",
		"nats stream edit "+j.cfg.Name+" --dupe-window 2m")
	window := j.c.Duplicates
	j.warn(j.cfg.Shared && window > 0 && window < sharedWindow, "stream-short-duplicate-window",
		fmt.Sprintf("the duplicate window is %s: "+
			"what a shared stream stored longer ago may be stored twice", window),
		"nats stream edit "+j.cfg.Name+" --dupe-window 2m")
	single := j.cfg.Batching.Resolve(j.c, false) == BatchSingle
	j.warn(exclusive && single && window > 0 && window < DuplicateWindow(false),
		"stream-short-duplicate-window",
		fmt.Sprintf("the duplicate window is %s: without batches it is the second net "+
			"under what a lost connection delivers late", window),
		"nats stream edit "+j.cfg.Name+" --dupe-window 5s")
	j.warn(j.c.AllowRollup, "stream-rollup",
		"allow_rollup_hdrs is set: whoever may publish can purge the stream with one message",
		"nats stream edit "+j.cfg.Name+" --no-allow-rollup")
}

// weaknesses are ways in which the newest messages may vanish before the relay
// has read them back.
func (j *judge) weaknesses() {
	const limits = "create a stream with retention limits"
	j.weak(j.c.Retention == jetstream.InterestPolicy, "stream-interest",
		"retention is interest: without a matching consumer a message is acknowledged and not stored", limits)
	j.weak(j.c.Retention == jetstream.WorkQueuePolicy, "stream-workqueue",
		"retention is workqueue: a message vanishes when it is consumed", limits)
	j.weak(j.c.MaxMsgsPerSubject > 0, "stream-per-subject-limit",
		fmt.Sprintf("max_msgs_per_subject is %d: a message vanishes when newer ones of its subject arrive",
			j.c.MaxMsgsPerSubject),
		"nats stream edit "+j.cfg.Name+" --max-msgs-per-subject=-1")
	j.weak(j.c.AllowMsgTTL || j.c.SubjectDeleteMarkerTTL > 0, "stream-ttl",
		"allow_msg_ttl is set: a message may vanish on its own", "create a stream without it")
	j.weak(j.c.MaxMsgs > 0 && j.c.MaxMsgs < 2*U && j.c.Discard == jetstream.DiscardOld, "stream-few-messages",
		fmt.Sprintf("max_msgs is %d with discard old: the relay reads back up to %d", j.c.MaxMsgs, 2*U),
		fmt.Sprintf("nats stream edit %s --max-msgs=%d", j.cfg.Name, 2*U))
}

func (j *judge) subjects() {
	all := strings.Join(j.c.Subjects, ", ")
	some, whole := false, true
	for _, wanted := range j.cfg.subjects() {
		some = some || slices.ContainsFunc(j.c.Subjects, func(s string) bool { return Overlap(s, wanted) })
		whole = whole && Covers(j.c.Subjects, wanted)
	}
	j.refuse(!some && j.c.Mirror == nil, "stream-subjects",
		fmt.Sprintf("the stream listens on %q, the relay publishes on %q", all, j.cfg.Pattern),
		"correct nats.stream or nats.subject, or let the stream take the subject: "+j.addSubject())
	j.warn(some && !whole, "stream-subjects-partial",
		fmt.Sprintf("the stream listens on %q only, the relay publishes on %q: "+
			"rows of other subjects are parked", all, j.cfg.Pattern),
		j.addSubject())
	if t := j.c.SubjectTransform; t != nil {
		j.warn(true, "stream-transform",
			fmt.Sprintf("subjects are transformed from %q to %q before they are stored",
				t.Source, t.Destination), "make sure that consumers filter by the transformed subject")
	}
}

// sizeLimits names those that are set.
func (j *judge) sizeLimits() string {
	var set []string
	if j.c.MaxMsgs > 0 {
		set = append(set, fmt.Sprintf("max_msgs is %d", j.c.MaxMsgs))
	}
	if j.c.MaxBytes > 0 {
		set = append(set, fmt.Sprintf("max_bytes is %d", j.c.MaxBytes))
	}
	return strings.Join(set, " and ")
}

// addSubject is a command that keeps the subjects which the new one does not
// contain.
func (j *judge) addSubject() string {
	cmd := "nats stream edit " + j.cfg.Name
	for _, s := range j.c.Subjects {
		if !matches(j.cfg.Pattern, s) {
			cmd += fmt.Sprintf(" --subjects=%q", s)
		}
	}
	for _, s := range j.cfg.subjects() {
		cmd += fmt.Sprintf(" --subjects=%q", s)
	}
	return cmd
}

// consumers are limited as of now.
func (j *judge) consumers(n int) {
	most := j.c.MaxConsumers
	j.warn(most > 0 && n >= most, "stream-max-consumers",
		fmt.Sprintf("the stream has the %d consumers that max_consumers allows: "+
			"a start reads messages one by one, verify and tail fail", most),
		"nats consumer rm "+j.cfg.Name)
}

func (j *judge) durability() {
	j.warn(j.c.Storage == jetstream.MemoryStorage, "stream-memory",
		"storage is memory: a restart of the server loses what was acknowledged",
		"create a stream with file storage")
	j.warn(j.c.Replicas < 2, "stream-one-replica",
		"the stream has one replica: a power failure may lose what was acknowledged up to two minutes before",
		"use three replicas (nats stream edit "+j.cfg.Name+" --replicas=3), "+
			"or sync_interval: always on the server")
}

func (j *judge) limits(maxPayload int64) {
	old := j.c.Discard == jetstream.DiscardOld
	j.warn(old && (j.c.MaxMsgs > 0 || j.c.MaxBytes > 0), "stream-discard-old",
		"a full stream drops its oldest messages, whether consumed or not",
		"nats stream edit "+j.cfg.Name+" --discard=new")
	j.warn(!old && (j.c.MaxMsgs > 0 || j.c.MaxBytes > 0), "stream-full",
		fmt.Sprintf("%s with discard new: a full stream takes nothing more, "+
			"and PostgreSQL keeps the WAL until there is room", j.sizeLimits()),
		"alert on the stream's size, and delete what was consumed "+
			"(nats stream purge "+j.cfg.Name+" --seq=N), or raise the limit in time")
	j.warn(j.c.MaxAge > 0, "stream-max-age",
		fmt.Sprintf("messages vanish after %s, whether consumed or not", j.c.MaxAge),
		"keep max_age above the longest outage of a consumer")
	j.warn(j.c.MaxMsgSize > 0 && int64(j.c.MaxMsgSize) < maxPayload, "stream-max-msg-size",
		fmt.Sprintf("max_msg_size is %d bytes, below the server's max_payload of %d: larger rows are parked",
			j.c.MaxMsgSize, maxPayload),
		"nats stream edit "+j.cfg.Name+" --max-msg-size=-1")
}
