package outbox_test

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestNoContentIsUnknown: a payload can be made whose hash is that of a content that is not known. Neither
// side says that it has it.
func TestNoContentIsUnknown(t *testing.T) {
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload"})
	if err != nil {
		t.Fatal(err)
	}
	ev := outbox.Event{Table: &outbox.Table{Schema: "public", Name: "box", Layout: layout}}
	ev.Values[outbox.ID], ev.Values[outbox.EventType] = []byte("1"), []byte("a")
	seed := outbox.HashText([]byte("a"), 0)
	payload := textOfHashZero(seed)
	if outbox.HashText(payload, seed) != outbox.UnknownHash {
		t.Fatalf("the hash of %q is not zero", payload)
	}
	ev.Values[outbox.Payload] = payload
	conn, err := pgx.Connect(t.Context(), testenv.SharedPostgres(t).NewDB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context()) //nolint:errcheck // nothing is buffered
	var hash int64
	err = conn.QueryRow(t.Context(), `SELECT `+ev.Table.HashSQL("t")+` FROM (SELECT 'a'::text AS event_type, $1::text AS payload) t`, string(payload)).Scan(&hash)
	if err != nil {
		t.Fatal(err)
	}
	if hash == outbox.UnknownHash || uint64(hash) != ev.Hash() {
		t.Errorf("the hash is %d, and %d in SQL", ev.Hash(), hash)
	}
}

// textOfHashZero runs outbox.HashText backwards until twelve letters come out.
func textOfHashZero(seed uint64) []byte {
	random := rand.New(rand.NewPCG(1, 2))
	text := make([]byte, 12)
	for {
		a0 := uint32(0x9e3779b9 + 12 + 3923095)
		b0, c0 := a0, a0
		a0, b0, c0 = mix(a0+uint32(seed>>32), b0+uint32(seed), c0)
		a, b, c := unmix(unfinish(random.Uint32(), 0, 0))
		binary.LittleEndian.PutUint32(text, a-a0)
		binary.LittleEndian.PutUint32(text[4:], b-b0)
		binary.LittleEndian.PutUint32(text[8:], c-c0)
		printable := true
		for _, x := range text {
			printable = printable && x >= ' ' && x < 0x7f
		}
		if printable {
			return text
		}
	}
}

func unfinish(a, b, c uint32) (uint32, uint32, uint32) {
	rot := bits.RotateLeft32
	c = (c + rot(b, 24)) ^ b
	b = (b + rot(a, 14)) ^ a
	a = (a + rot(c, 4)) ^ c
	c = (c + rot(b, 16)) ^ b
	b = (b + rot(a, 25)) ^ a
	a = (a + rot(c, 11)) ^ c
	c = (c + rot(b, 14)) ^ b
	return a, b, c
}

func unmix(a, b, c uint32) (uint32, uint32, uint32) {
	rot := bits.RotateLeft32
	b -= a
	c = (c ^ rot(b, 4)) + b
	a -= c
	b = (b ^ rot(a, 19)) + a
	c -= b
	a = (a ^ rot(c, 16)) + c
	b -= a
	c = (c ^ rot(b, 8)) + b
	a -= c
	b = (b ^ rot(a, 6)) + a
	c -= b
	a = (a ^ rot(c, 4)) + c
	return a, b, c
}

func mix(a, b, c uint32) (uint32, uint32, uint32) {
	rot := bits.RotateLeft32
	a = (a - c) ^ rot(c, 4)
	c += b
	b = (b - a) ^ rot(a, 6)
	a += c
	c = (c - b) ^ rot(b, 8)
	b += a
	a = (a - c) ^ rot(c, 16)
	c += b
	b = (b - a) ^ rot(a, 19)
	a += c
	c = (c - b) ^ rot(b, 4)
	b += a
	return a, b, c
}
