package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"
)

// wire is a connection whose reads have other lengths each time.
type wire struct {
	rest []byte
	rng  *rand.Rand
}

func (w *wire) Read(p []byte) (int, error) {
	if len(w.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), 1+w.rng.IntN([]int{9000, 9000, 9000, 200_000}[w.rng.IntN(4)]))], w.rest)
	w.rest = w.rest[n:]
	return n, nil
}

func message(kind byte, body []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4)), body...)
}

// filler is a body whose bytes tell their place.
func filler(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i + i>>8)
	}
	if n > 0 {
		b[0] = 'w'
	}
	return b
}

// TestAbridger: whatever the pieces that messages arrive and are read in, all go through
// as they are, except for CopyData that is too long. What matters lies at the ends of
// messages, so that most are short.
func TestAbridger(t *testing.T) {
	whole, p := filler(3*plainMessage), make([]byte, 200_000)
	var in, want []byte
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		most := plainMessage + rng.IntN(plainMessage/4)
		in, want = in[:0], want[:0]
		for range 60 {
			n := []int{0, 1, 4, 30, 31, 300, 301, 2048, 8192, 8192, most, most + 1, most + 1 + rng.IntN(most), rng.IntN(most)}[rng.IntN(14)]
			kind := "dddN"[rng.IntN(4)]
			body := whole[:n]
			in = append(in, message(kind, body)...)
			if kind == 'd' && n > most {
				body = append(whole[:xlogDataHeader:xlogDataHeader], "short"...)
			}
			want = append(want, message(kind, body)...)
		}
		a := &abridger{most: most, r: &wire{in, rng}, shorten: func(dst []byte, r io.Reader, n int) ([]byte, error) {
			_, err := io.CopyN(io.Discard, r, int64(n))
			return append(dst, "short"...), err
		}}
		came := 0
		for {
			n, err := a.Read(p[:1+rng.IntN([]int{20_000, 20_000, 20_000, len(p)}[rng.IntN(4)])])
			if !bytes.HasPrefix(want[came:], p[:n]) {
				t.Fatalf("seed %d: other bytes come through behind %d", seed, came)
			}
			came += n
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if came != len(want) {
			t.Fatalf("seed %d: %d bytes came through, want %d", seed, came, len(want))
		}
	}
}

// TestAbridgerBreaksOff: a message that is read through and breaks off is an error for
// ever. What is behind it makes no sense.
func TestAbridgerBreaksOff(t *testing.T) {
	begin := message('d', bytes.Repeat([]byte{'w'}, 3*plainMessage))[:plainMessage]
	a := &abridger{r: io.MultiReader(bytes.NewReader(begin), failing{}, bytes.NewReader(begin)), shorten: func(dst []byte, r io.Reader, n int) ([]byte, error) {
		_, err := io.CopyN(io.Discard, r, int64(n))
		return dst, err
	}}
	for range 2 {
		if n, err := a.Read(make([]byte, 100)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
	keepalive := message('d', bytes.Repeat([]byte{'k'}, 2*plainMessage))
	a = &abridger{r: bytes.NewReader(keepalive), shorten: a.shorten}
	if _, err := a.Read(make([]byte, 100)); err == nil {
		t.Error("a keepalive of such a length is taken for a message")
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

// BenchmarkAbridger is what an ordinary message costs.
func BenchmarkAbridger(b *testing.B) {
	in := bytes.Repeat(message('d', bytes.Repeat([]byte{'w'}, 350)), 1000)
	p := make([]byte, 8192)
	b.ReportAllocs()
	for b.Loop() {
		a := abridger{r: bytes.NewReader(in), most: 1 << 20}
		for {
			if _, err := a.Read(p); err != nil {
				break
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed())/float64(time.Nanosecond)/float64(b.N)/1000, "ns/message")
}
