package decode

import (
	"bytes"
	"math"
	"math/big"
	"strconv"
)

// appendFloat renders as PostgreSQL does since 12 with extra_float_digits > 0:
// the shortest digits that read back as the same value, in printf's %g shape.
func appendFloat(dst []byte, f float64, bits int) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "NaN"...)
	case math.IsInf(f, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(f, -1):
		return append(dst, "-Infinity"...)
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, 'e', shortest(f, bits), bits)
	if e := exponent(dst[start:]); e >= -4 && e < fixedBelow(bits) {
		return strconv.AppendFloat(dst[:start], f, 'f', -1, bits)
	}
	return dst
}

// fixedBelow is the decimal exponent from which on numbers are written with an
// exponent: the decimal digits that the type is sure to keep.
func fixedBelow(bits int) int {
	if bits == 32 {
		return 6
	}
	return 15
}

// exponent reads the exponent of a number in Go's %e form.
func exponent(s []byte) int {
	e, _ := strconv.Atoi(string(s[bytes.IndexByte(s, 'e')+1:]))
	return e
}

// shortest is the precision of the shortest digits, -1 where Go's are the same.
// PostgreSQL avoids the exact midpoint between two floats, which reads back
// right only where ties go to even; Go does not avoid it.
func shortest(f float64, bits int) int {
	if !isMidpoint(strconv.FormatFloat(f, 'e', -1, bits), f, bits) {
		return -1
	}
	digits := len(strconv.FormatFloat(math.Abs(f), 'e', -1, bits))
	for precision := 0; precision < digits+17; precision++ {
		s := strconv.FormatFloat(f, 'e', precision, bits)
		back, err := strconv.ParseFloat(s, bits)
		if err == nil && back == f && !isMidpoint(s, f, bits) {
			return precision
		}
	}
	return -1
}

// isMidpoint reports whether the decimal lies exactly between f and one of its
// neighbours. That needs a decimal as short as s to be a multiple of half a
// unit in f's last place, which only values between 2^20 and 2^140 can have.
func isMidpoint(s string, f float64, bits int) bool {
	if a := math.Abs(f); a < 1<<20 || a > 1<<140 {
		return false
	}
	const exact = 512
	d, _, err := big.ParseFloat(s, 10, exact, big.ToNearestEven)
	if err != nil || d.Cmp(big.NewFloat(f)) == 0 {
		return false
	}
	neighbour := next(f, d.Cmp(big.NewFloat(f)), bits)
	sum := new(big.Float).SetPrec(exact).Add(big.NewFloat(f), big.NewFloat(neighbour))
	return sum.Cmp(new(big.Float).SetPrec(exact).Add(d, d)) == 0
}

// next is the float beside f in the direction of the sign.
func next(f float64, sign, bits int) float64 {
	if bits == 32 {
		return float64(math.Nextafter32(float32(f), float32(math.Inf(sign))))
	}
	return math.Nextafter(f, math.Inf(sign))
}
