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
	n := copy(p[:min(len(p), 1+w.rng.IntN(9000))], w.rest)
	w.rest = w.rest[n:]
	return n, nil
}

func message(kind byte, body []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4)), body...)
}

// TestAbridger: whatever the pieces that messages arrive and are read in, all go through
// as they are, except for CopyData that is too long.
func TestAbridger(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		most := plainMessage + rng.IntN(3*plainMessage)
		var in, want []byte
		for range 60 {
			n := []int{0, 4, 30, 300, 8192, most, most + 1, 2 * most, 5 * most}[rng.IntN(9)]
			kind := "dddN"[rng.IntN(4)]
			body := bytes.Repeat([]byte{'w'}, n)
			in = append(in, message(kind, body)...)
			if kind == 'd' && n > most {
				body = append(bytes.Repeat([]byte{'w'}, xlogDataHeader), "short"...)
			}
			want = append(want, message(kind, body)...)
		}
		a := &abridger{most: most, r: &wire{in, rng}, shorten: func(dst []byte, r io.Reader, n int) ([]byte, error) {
			_, err := io.CopyN(io.Discard, r, int64(n))
			return append(dst, "short"...), err
		}}
		var got []byte
		for {
			p := make([]byte, 1+rng.IntN(20_000))
			n, err := a.Read(p)
			got = append(got, p[:n]...)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("seed %d: %d bytes came through, want %d", seed, len(got), len(want))
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
