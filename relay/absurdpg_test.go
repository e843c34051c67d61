package relay_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// absurdPostgres stands between a relay and its server, and changes some of the server's messages.
type absurdPostgres struct {
	sane atomic.Bool
	mu   sync.Mutex
	rng  *rand.Rand
	next []int // of absurdMessages
}

// absurdMessages are what becomes of a message. Where ends is set, the connection is closed behind it.
var absurdMessages = []struct {
	name string
	ends bool
	of   func(m []byte, rng *rand.Rand) []byte
}{
	{"cut", true, func(m []byte, rng *rand.Rand) []byte { return m[:rng.IntN(len(m))] }},
	{"cut, and the next one behind it", false, func(m []byte, rng *rand.Rand) []byte { return m[:rng.IntN(len(m))] }},
	{"shorter than it says", false, func(m []byte, rng *rand.Rand) []byte { return sized(m, len(m)+rng.IntN(100)) }},
	{"longer than it says", false, func(m []byte, rng *rand.Rand) []byte { return sized(m, 4+rng.IntN(len(m))) }},
	{"of a gigabyte", false, func(m []byte, _ *rand.Rand) []byte { return sized(m, 1<<30-2) }},
	{"of two gigabytes", false, func(m []byte, _ *rand.Rand) []byte { return sized(m, 1<<31-1) }},
	{"of a negative length", false, func(m []byte, _ *rand.Rand) []byte { return sized(m, 1<<32-1) }},
	{"of no length", false, func(m []byte, _ *rand.Rand) []byte { return sized(m, 0) }},
	{"of another type", false, func(m []byte, rng *rand.Rand) []byte {
		m[0] = byte(rng.IntN(256))
		return m
	}},
	{"without its end", false, func(m []byte, rng *rand.Rand) []byte {
		m = m[:5+rng.IntN(len(m)-4)]
		return sized(m, len(m)-1)
	}},
	{"a fatal error without a field", false, func([]byte, *rand.Rand) []byte { return []byte{'E', 0, 0, 0, 5, 0} }},
	{"an error whose fields do not end", false, func([]byte, *rand.Rand) []byte { return append([]byte{'E', 0, 0, 0, 9}, "SFATA"...) }},
	{"65,535 columns", false, func([]byte, *rand.Rand) []byte { return []byte{'D', 0, 0, 0, 6, 255, 255} }},
	{"WAL of another kind", false, func([]byte, *rand.Rand) []byte { return []byte{'d', 0, 0, 0, 5, 'x'} }},
	{"WAL without its head", false, func([]byte, *rand.Rand) []byte { return []byte{'d', 0, 0, 0, 6, 'w', 0} }},
	{"an end of the WAL", false, func([]byte, *rand.Rand) []byte { return []byte{'c', 0, 0, 0, 4} }},
}

// sized is a message that says another length.
func sized(m []byte, n int) []byte {
	binary.BigEndian.PutUint32(m[1:], uint32(n))
	return m
}

func (a *absurdPostgres) pass(from *bufio.Reader, to io.Writer) {
	for {
		head, err := from.Peek(5)
		if err != nil {
			return
		}
		m := make([]byte, 1+binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(from, m); err != nil {
			return
		}
		m, ends := a.change(m)
		if _, err := to.Write(m); err != nil || ends {
			return
		}
	}
}

func (a *absurdPostgres) change(m []byte) (changed []byte, ends bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sane.Load() || a.rng.IntN(300) > 0 {
		return m, false
	}
	c := absurdMessages[a.next[0]]
	if a.next = a.next[1:]; len(a.next) == 0 {
		a.sane.Store(true)
	}
	return c.of(m, a.rng), c.ends
}

// TestAbsurdPostgres: messages of the server are cut, of impossible lengths and types, and without their ends. No session goes on with them,
// and every row is stored once.
func TestAbsurdPostgres(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(nil)
	u, err := url.Parse(r.cfg.PostgresURL)
	r.must(err)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	a := &absurdPostgres{rng: rand.New(rand.NewPCG(seed, 0))}
	a.next = a.rng.Perm(len(absurdMessages))
	a.sane.Store(true)
	host := u.Host
	u.Host = between(t, func() string { return host }, a.pass)
	r.cfg.PostgresURL = u.String()
	x := r.start().streaming()
	a.sane.Store(false)
	n := 0
	eventually(t, "messages are changed in every way", func() bool {
		r.put(n+1, n+100)
		n += 100
		return a.sane.Load()
	})
	r.pending(0)
	got := r.numbers()
	slices.Sort(got)
	if !slices.Equal(got, span(1, n)) {
		t.Errorf("stored %s, want %s", brief(got), brief(span(1, n)))
	}
	x.halt()
	why := map[string]int{}
	for _, e := range x.logs.All() {
		if err, ok := e.ContextMap()["error"]; ok {
			why[fmt.Sprint(err)]++
		}
	}
	if len(why) < 5 {
		t.Errorf("the relay gives %d reasons", len(why))
	}
	for text, times := range why {
		t.Logf("%d times: %s", times, strings.TrimSpace(text))
	}
}
