package relay_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// absurdNATS stands between a relay and its nats-server, and changes some of the acknowledgements.
type absurdNATS struct {
	every int // one of so many acknowledgements is changed
	sane  atomic.Bool
	mu    sync.Mutex
	rng   *rand.Rand
	did   map[string]int
}

var acknowledged = regexp.MustCompile(`"seq":\d+`)

// acks are what becomes of an acknowledgement: it is followed by late ones of before.
var absurdAcks = []struct {
	name string
	of   func(ack []byte) [][]byte
}{
	{"of another stream", func(ack []byte) [][]byte {
		return [][]byte{bytes.Replace(ack, []byte(`"EVENTS"`), []byte(`"OTHERS"`), 1)}
	}},
	{"sequence 0", func(ack []byte) [][]byte { return [][]byte{acknowledged.ReplaceAll(ack, []byte(`"seq":0`))} }},
	{"the greatest sequence", func(ack []byte) [][]byte {
		return [][]byte{acknowledged.ReplaceAll(ack, []byte(`"seq":18446744073709551615`))}
	}},
	{"a greater sequence than there is", func(ack []byte) [][]byte {
		return [][]byte{acknowledged.ReplaceAll(ack, []byte(`"seq":18446744073709551616`))}
	}},
	{"duplicate", func(ack []byte) [][]byte {
		return [][]byte{bytes.Replace(ack, []byte(`}`), []byte(`,"duplicate":true}`), 1)}
	}},
	{"count", func(ack []byte) [][]byte { return [][]byte{bytes.Replace(ack, []byte(`}`), []byte(`,"count":7}`), 1)} }},
	{"twice", func(ack []byte) [][]byte { return [][]byte{ack, ack} }},
	{"never", func(ack []byte) [][]byte { return nil }},
	{"cut", func(ack []byte) [][]byte { return [][]byte{ack[:len(ack)/2]} }},
	{"empty", func(ack []byte) [][]byte { return [][]byte{{}} }},
	{"no JSON", func(ack []byte) [][]byte { return [][]byte{bytes.Repeat([]byte("["), 10_000)} }},
	{"a refusal", func(ack []byte) [][]byte {
		return [][]byte{[]byte(`{"error":{"code":500,"err_code":99999,"description":"no"},"stream":"EVENTS","seq":0}`)}
	}},
}

func newAbsurdNATS(t *testing.T, url string) (a *absurdNATS, proxied string) {
	t.Helper()
	a = &absurdNATS{every: 20, rng: rand.New(rand.NewPCG(rand.Uint64(), 0)), did: map[string]int{}}
	return a, "nats://" + between(t, func() string { return strings.TrimPrefix(url, "nats://") }, a.pass)
}

// between listens in front of a server, of an address at the time, and hands over what clients say. What the server says is handed over by answer,
// which closes the connection where it returns.
func between(t *testing.T, address func() string, answer func(from *bufio.Reader, to io.Writer)) (own string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", address())
			if err != nil {
				_ = client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); _ = server.Close() }()
			go func() { answer(bufio.NewReader(server), client); _ = client.Close(); _ = server.Close() }()
		}
	}()
	return l.Addr().String()
}

// pass hands over what the server says.
func (a *absurdNATS) pass(from *bufio.Reader, to io.Writer) {
	var late [][]byte
	for {
		line, err := from.ReadBytes('\n')
		if err != nil {
			return
		}
		words := strings.Fields(string(line))
		if len(words) < 4 || words[0] != "MSG" && words[0] != "HMSG" {
			if _, err := to.Write(line); err != nil {
				return
			}
			continue
		}
		size, _ := strconv.Atoi(words[len(words)-1])
		body := make([]byte, size+2)
		if _, err := io.ReadFull(from, body); err != nil {
			return
		}
		all := [][]byte{append(line, body...)}
		if ack := body[:size]; words[0] == "MSG" && bytes.HasPrefix(ack, []byte(`{"stream":"EVENTS"`)) && bytes.Contains(ack, []byte(`"seq":`)) {
			all = nil
			for _, changed := range a.change(ack) {
				all = append(all, fmt.Appendf(nil, "%s %d\r\n%s\r\n", strings.Join(words[:len(words)-1], " "), len(changed), changed))
			}
			if a.one(30) && !a.sane.Load() {
				late, all = append(late, all...), nil
			} else if len(late) > 0 && a.one(3) {
				all, late = append(all, late...), nil
			}
		}
		for _, m := range all {
			if _, err := to.Write(m); err != nil {
				return
			}
		}
	}
}

// ways is in how many ways acknowledgements were changed.
func (a *absurdNATS) ways() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.did)
}

func (a *absurdNATS) one(of int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rng.IntN(of) == 0
}

func (a *absurdNATS) change(ack []byte) [][]byte {
	if a.sane.Load() || !a.one(a.every) {
		return [][]byte{ack}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c := absurdAcks[a.rng.IntN(len(absurdAcks))]
	a.did[c.name]++
	return c.of(ack)
}

// TestAbsurdAcks: acknowledgements are of another stream, of impossible sequences, late, never, twice, cut. Each such session ends, and every
// row is stored once, in its order.
func TestAbsurdAcks(t *testing.T) {
	t.Parallel()
	for _, shared := range []bool{false, true} {
		for _, batching := range []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic} {
			if shared && batching != jetstream.BatchSingle {
				continue // a shared stream takes no other
			}
			t.Run(fmt.Sprintf("%s/shared=%v", batching, shared), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.cfg.Stream.Batching, r.cfg.Stream.Shared = batching, shared
				r.createStream(nil)
				a, proxied := newAbsurdNATS(t, r.nats.URL())
				if batching != jetstream.BatchSingle { // one for many messages
					a.every = 3
				}
				r.cfg.NATS.URL = proxied
				x := r.start().streaming()
				n := 0
				eventually(t, "acknowledgements are changed in some ways, and one is refused", func() bool {
					r.put(n+1, n+100)
					n += 100
					return a.ways() >= 3 && slices.ContainsFunc(x.logs.All(), func(e observer.LoggedEntry) bool {
						return strings.Contains(fmt.Sprint(e.ContextMap()["error"]), "invalid PubAck")
					})
				})
				a.sane.Store(true)
				r.pending(0)
				if got := r.numbers(); !slices.Equal(got, span(1, n)) {
					t.Errorf("stored %s, want %s", brief(got), brief(span(1, n)))
				}
				x.halt()
			})
		}
	}
}
