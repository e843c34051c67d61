package idempotency_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/walpost/walpost/idempotency"
)

// python canonicalizes each document with Python's own json, except for numbers of which a float is another one; "!" is what it
// refuses.
func python(t testing.TB, documents []string) []string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal("python3 is missing, and the request hash is compared with what its json writes: " +
			"run .ci/deps python3, or install it (Debian, Ubuntu: apt-get install python3)")
	}
	const script = `
import base64, json, re, sys
def value(text):
    m = re.fullmatch(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([-+]?\d+))?", text)
    if not m:
        return text
    sign, whole, fraction, power = m.group(1), m.group(2), m.group(3) or "", int(m.group(4) or 0)
    digits = (whole + fraction).lstrip("0")
    short = digits.rstrip("0")
    return sign + (short + "e%d" % (power - len(fraction) + len(digits) - len(short)) if short else "0")
def number(text):
    exact = value(text)
    return float(text) if exact == value(repr(float(text))) else "\x01" + exact + "\x02"
for line in sys.stdin:
    try:
        text = base64.b64decode(line).decode("utf-8")
        out = json.dumps(json.loads(text, parse_float=number), sort_keys=True, separators=(",", ":"))
        out = re.sub(r'"\\u0001([-0-9e]+)\\u0002"', r'\1', out)
    except Exception:
        out = "!"
    print(base64.b64encode(out.encode("ascii")).decode())
`
	var in bytes.Buffer
	for _, d := range documents {
		fmt.Fprintln(&in, base64.StdEncoding.EncodeToString([]byte(d)))
	}
	cmd := exec.Command(path, "-c", script)
	cmd.Stdin = &in
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("run python3: %v", err)
	}
	lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	if len(lines) != len(documents) {
		t.Fatalf("python3 answered %d of %d documents", len(lines), len(documents))
	}
	for i, line := range lines {
		text, err := base64.StdEncoding.DecodeString(line)
		if err != nil {
			t.Fatal(err)
		}
		lines[i] = string(text)
	}
	return lines
}

func canonical(d string) string {
	text, err := idempotency.CanonicalJSON([]byte(d))
	if err != nil {
		return "!"
	}
	return string(text)
}

// known are documents whose canonical form is easy to get wrong.
var known = []string{
	`{}`, `[]`, ` [ ] `, "\t{\n}\r", `null`, `true`, `false`, `nul`, `nulll`, `truefalse`, ``, ` `, `,`,
	`1`, `1.0`, `1.10`, `-0`, `-0.0`, `-0e0`, `-0.0e-5`, `0`, `00`, `01`, `-01`, `-`, `+1`, `.5`, `1.`, `1.e5`, `1e`, `1e+`, `2E-`,
	`1E5`, `1e5`, `1e+05`, `1e15`, `1e16`, `1e17`, `123456789012345678`, `1234567890123456789012345678901234567890`, `1e22`, `1e23`,
	`9007199254740993.0`, `0.1`, `0.10000000000000001`, `0.0001`, `0.00001`, `0.00012345`, `1e-4`, `1e-5`, `1e-7`, `123456.789e3`,
	`1e308`, `1e309`, `-1e309`, `1e999`, `1e-999`, `-1e-999`, `5e-324`, `2.4703282292062328e-324`, `1.7976931348623157e308`,
	`NaN`, `Infinity`, `-Infinity`, `-NaN`, `-I`, `[NaN,Infinity,-Infinity]`, `nan`, `inf`, `+Infinity`,
	`0x10`, `1_000`, `1e1_0`, `١`, `"` + "\u0661" + `"`,
	strings.Repeat("1", 4300), "-" + strings.Repeat("1", 4300), strings.Repeat("1", 4301), strings.Repeat("1", 5000) + ".5", "0." + strings.Repeat("3", 5000),
	strings.Repeat("1", 400) + "e-400",
	`""`, `"a"`, `"\""`, `"\\"`, `"\/"`, `"/"`, `"\b\f\n\r\t"`, `"\u0000"`, `"\u001f"`, `"\u007f"`, "\"\x7f\"", "\"\x1f\"", "\"\n\"", `"\a"`, `"\x41"`, `"\`, `"`, `"\u"`,
	`"\u00e9"`, `"é"`, `"\u20AC"`, `"€"`, `"😀"`, `"\ud83d\ude00"`, `"\uD83D\uDE00"`, `"\ud83d"`, `"\ude00"`, `"\ude00\ud83d"`, `"\ud83d\ud83d\ude00"`, `"\ud83dx\ude00"`,
	`"\ud83d\n"`, `"\ud83d\u0041"`, `"\ud83d\u00"`, `"\ud83d\u00zz"`, `"\ud83d\`, `"\ud83d\u`, `"\u12g4"`, `"\u+123"`, `"\u 123"`, `"\u12_4"`, `"\U0041"`,
	"\"\xff\"", "\"\xed\xa0\x80\"", "\"\xc0\x80\"", "\ufeff{}", "\xff\xfe{\x00}\x00", "{\x00}", "\"\x00\"",
	`{"a":1,"a":2}`, `{"b":1,"a":2}`, `{"a":{"z":1,"y":2},"A":[3,{"c":1,"b":2}]}`, `{"a":1,"\u0061":2}`, `{"":0}`, `{"10":1,"9":2}`,
	`{"\ud800":1,"\uffff":2,"\ud83d\ude00":3,"z":4}`, `{"\ue000":1,"😀":2}`, `{"é":1,"e":2,"z":3}`,
	`{"a":1,}`, `[1,]`, `[,1]`, `{,}`, `{"a"}`, `{"a":}`, `{a:1}`, `{'a':1}`, `{1:2}`, `[1 2]`, `[1`, `{"a":1`, `{"a" : 1 , "b":[ 1 , 2 ] }`, `[1]x`, `[1] [2]`, "[1\v]", "[1\u00a0]",
	`// c`, `[1,/*c*/2]`, `[[[[]]]]`, `[{}]`, strings.Repeat("[", 500) + strings.Repeat("]", 500), strings.Repeat(`{"a":`, 300) + "1" + strings.Repeat("}", 300),
	strings.Repeat("[", 100_000), `{"a":[1,2,{"b":null}],"c":"d"}`,
}

func TestCanonicalJSONIsPythons(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 22))
	documents := append([]string(nil), known...)
	for range 20_000 {
		documents = append(documents, randomDocument(rnd))
	}
	valid := 0
	for i, want := range python(t, documents) {
		if got := canonical(documents[i]); got != want {
			t.Errorf("%.200q: %.200q, Python writes %.200q", documents[i], got, want)
		}
		if want != "!" {
			valid++
		}
	}
	if valid < len(documents)/3 || valid > len(documents)*9/10 {
		t.Errorf("%d of %d documents are valid: the corpus shows little", valid, len(documents))
	}
}

// TestNumbersAreComparedExactly: two numbers that a double does not tell apart are two.
func TestNumbersAreComparedExactly(t *testing.T) {
	for _, x := range []struct {
		a, b string
		same bool
	}{
		{"12345678901234567890.1", "12345678901234567899.9", false},
		{"0.1", "0.10000000000000001", false},
		{"1e999", "1e998", false},
		{"1e999", "Infinity", false},
		{"1e-999", "0.0", false},
		{"9007199254740993.0", "9007199254740992.0", false},
		{"1e99999999999999999999", "1e99999999999999999998", false},
		{"0.1", "1e-1", true},
		{"12345678901234567890.10", "123456789012345678901E-1", true},
		{"10e998", "1e+0999", true},
		{"-0.0", "-0e5", true},
		{"1.0", "1", false}, // as in Python
	} {
		if same := canonical(x.a) == canonical(x.b); same != x.same {
			t.Errorf("%s and %s are the same: %t", x.a, x.b, same)
		}
	}
}

// Deeper documents are refused, whatever the version of Python takes.
func TestCanonicalJSONBoundsDepth(t *testing.T) {
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	if d := nested(idempotency.MaxDepth); canonical(d) != d {
		t.Errorf("a document of depth %d is refused", idempotency.MaxDepth)
	}
	if canonical(nested(idempotency.MaxDepth+1)) != "!" {
		t.Errorf("a document of depth %d is taken", idempotency.MaxDepth+1)
	}
}

// randomDocument is JSON written in an unusual way; often one byte of it is changed or lost.
func randomDocument(rnd *rand.Rand) string {
	var b strings.Builder
	writeValue(rnd, &b, 4)
	text := []byte(b.String())
	if rnd.IntN(3) == 0 {
		at := rnd.IntN(len(text))
		switch rnd.IntN(3) {
		case 0:
			text = append(text[:at], text[at+1:]...)
		case 1:
			text[at] = byte(rnd.IntN(256))
		default:
			text[at] = `{}[]",:\u0123456789eE+-.dD8N`[rnd.IntN(28)]
		}
	}
	return string(text)
}

func writeValue(rnd *rand.Rand, b *strings.Builder, depth int) {
	kind := rnd.IntN(6)
	if depth == 0 {
		kind = rnd.IntN(4)
	}
	writeSpace(rnd, b)
	switch kind {
	case 0:
		b.WriteString([]string{"null", "true", "false", "NaN", "Infinity", "-Infinity"}[rnd.IntN(6)])
	case 1, 2:
		writeNumber(rnd, b)
	case 3:
		writeString(rnd, b)
	case 4:
		b.WriteByte('[')
		for i := range rnd.IntN(4) {
			if i > 0 {
				b.WriteByte(',')
			}
			writeValue(rnd, b, depth-1)
		}
		b.WriteByte(']')
	case 5:
		b.WriteByte('{')
		for i := range rnd.IntN(5) {
			if i > 0 {
				b.WriteByte(',')
			}
			writeSpace(rnd, b)
			writeString(rnd, b)
			writeSpace(rnd, b)
			b.WriteByte(':')
			writeValue(rnd, b, depth-1)
		}
		b.WriteByte('}')
	}
	writeSpace(rnd, b)
}

func writeSpace(rnd *rand.Rand, b *strings.Builder) {
	if rnd.IntN(4) == 0 {
		b.WriteString([]string{" ", "\n", "\t", "\r", "  "}[rnd.IntN(5)])
	}
}

func writeNumber(rnd *rand.Rand, b *strings.Builder) {
	if rnd.IntN(3) == 0 {
		b.WriteByte('-')
	}
	if rnd.IntN(4) == 0 {
		b.WriteByte('0')
	} else {
		b.WriteByte(byte('1' + rnd.IntN(9)))
		for range rnd.IntN(22) {
			b.WriteByte(byte('0' + rnd.IntN(10)))
		}
	}
	if rnd.IntN(2) == 0 {
		b.WriteByte('.')
		for range 1 + rnd.IntN(20) {
			b.WriteByte(byte('0' + rnd.IntN(10)))
		}
	}
	if rnd.IntN(3) == 0 {
		b.WriteString([]string{"e", "E", "e+", "E-", "e-"}[rnd.IntN(5)])
		fmt.Fprint(b, rnd.IntN(340))
	}
}

func writeString(rnd *rand.Rand, b *strings.Builder) {
	b.WriteByte('"')
	for range rnd.IntN(6) {
		switch rnd.IntN(7) {
		case 0, 1:
			b.WriteByte("abAB01 ~"[rnd.IntN(8)])
		case 2:
			b.WriteString([]string{`\"`, `\\`, `\/`, `\b`, `\f`, `\n`, `\r`, `\t`}[rnd.IntN(8)])
		case 3:
			fmt.Fprintf(b, `\u%04x`, rnd.IntN(0x10000))
		case 4:
			fmt.Fprintf(b, `\uD%X%02x`, 8+rnd.IntN(8), rnd.IntN(256))
		case 5:
			b.WriteRune([]rune("é€😀\x7f\u2028\ue000\uffff")[rnd.IntN(7)])
		case 6:
			b.WriteRune(rune(rnd.IntN(0x3000)) + 0x80)
		}
	}
	b.WriteByte('"')
}

// FuzzCanonicalJSON: whatever the text, the parser ends without a panic. What it takes it writes in a form
// that stays as it is, that is ASCII, and that the standard library reads where it is JSON.
func FuzzCanonicalJSON(f *testing.F) {
	for _, d := range known {
		f.Add([]byte(d))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		first, err := idempotency.CanonicalJSON(text)
		if err != nil {
			if json.Valid(text) && utf8.Valid(text) && len(text) < idempotency.MaxDepth {
				t.Fatalf("%q is refused", text)
			}
			return
		}
		second, err := idempotency.CanonicalJSON(first)
		if err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%q becomes %q becomes %q, %v", text, first, second, err)
		}
		if bytes.ContainsFunc(first, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Fatalf("%q becomes %q", text, first)
		}
		if json.Valid(text) && !json.Valid(first) {
			var v any
			if json.Unmarshal(text, &v) == nil {
				t.Fatalf("%q becomes %q, which is not JSON", text, first)
			}
		}
	})
}
