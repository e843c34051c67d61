package verify

// Kind is what is wrong with a row or a message.
type Kind string

const (
	// Missing: the table says that the row is stored, or the WAL is past it, and the
	// stream has no message of it.
	Missing Kind = "missing"
	// Duplicated: several messages have one message id.
	Duplicated Kind = "duplicated"
	// Reordered: a message of an aggregate stands behind one that was committed
	// later.
	Reordered Kind = "reordered"
	// Unknown: a message of this source, and neither outbox, archive nor dead
	// letters have its row.
	Unknown Kind = "unknown"
	// Phantom: a message of WAL that this server never had.
	Phantom Kind = "phantom"
)

// Kinds are all of them, in the order in which they are told.
var Kinds = []Kind{Missing, Duplicated, Reordered, Unknown, Phantom}

// examples bounds what a report tells of each kind.
const examples = 10

// Case is one row or message that something is wrong with.
type Case struct {
	Row string `json:"row"`           // schema.table/id
	Seq uint64 `json:"seq,omitempty"` // of the message, in the stream
	// Detail says more, for people.
	Detail string `json:"detail,omitempty"`
}

// Findings are all the cases of one kind, and the first of them.
type Findings struct {
	Count    int64  `json:"count"`
	Examples []Case `json:"examples,omitempty"`
}

// Report is the outcome of a comparison.
type Report struct {
	// FirstSeq and LastSeq are the first and the last sequence that were read.
	FirstSeq uint64 `json:"first_seq"`
	LastSeq  uint64 `json:"last_seq"`
	// Messages are those of this source, Replays those among them that were published
	// again on purpose.
	Messages int64 `json:"messages"`
	Replays  int64 `json:"replays"`
	// Rows are those that are marked as stored and were looked for in the stream. One
	// that was archived meanwhile may be counted twice.
	Rows int64 `json:"rows"`
	// Pending rows are due, and nothing proves that they should be stored by now.
	Pending int64 `json:"pending"`
	// Found has every kind.
	Found map[Kind]*Findings `json:"found"`
	// Repaired are missing rows that were made pending again.
	Repaired int64 `json:"repaired"`
	// Incomplete: the comparison broke off, and this is what had been found.
	Incomplete bool `json:"incomplete,omitempty"`
	// Notes say what could not be compared, and why.
	Notes []string `json:"notes,omitempty"`
}

func newReport() *Report {
	r := &Report{Found: map[Kind]*Findings{}}
	for _, k := range Kinds {
		r.Found[k] = &Findings{}
	}
	return r
}

// Faults is the number of all cases.
func (r *Report) Faults() (n int64) {
	for _, f := range r.Found {
		n += f.Count
	}
	return n
}

func (r *Report) add(k Kind, c Case) {
	f := r.Found[k]
	if f.Count++; len(f.Examples) < examples {
		f.Examples = append(f.Examples, c)
	}
}
