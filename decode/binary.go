package decode

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// OIDs of the built-in types whose binary form is understood.
const (
	oidBool        = 16
	oidBytea       = 17
	oidName        = 19
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidOID         = 26
	oidJSON        = 114
	oidXML         = 142
	oidFloat4      = 700
	oidFloat8      = 701
	oidBPChar      = 1042
	oidVarchar     = 1043
	oidDate        = 1082
	oidTimestamp   = 1114
	oidTimestamptz = 1184
	oidUUID        = 2950
	oidJSONB       = 3802
)

// render gives a binary value the text that its output function would. Where
// the two are the same bytes nothing is copied.
func (d *Decoder) render(typ uint32, v []byte) ([]byte, error) {
	switch typ {
	case oidText, oidVarchar, oidBPChar, oidName, oidJSON, oidXML:
		return v, nil
	case oidJSONB:
		if len(v) == 0 || v[0] != 1 {
			return nil, errors.New("jsonb is not of version 1")
		}
		return v[1:], nil
	}
	want, ok := width(typ)
	if !ok {
		return nil, fmt.Errorf("no binary form known of the type with OID %d", typ)
	}
	if want >= 0 && want != len(v) {
		return nil, fmt.Errorf("type with OID %d: want %d bytes, have %d", typ, want, len(v))
	}
	start := len(d.text)
	d.text = appendText(d.text, typ, v)
	return d.text[start:len(d.text):len(d.text)], nil
}

// width is the size of a type's binary form, -1 where it varies.
func width(typ uint32) (int, bool) {
	switch typ {
	case oidBytea:
		return -1, true
	case oidBool:
		return 1, true
	case oidInt2:
		return 2, true
	case oidInt4, oidOID, oidFloat4, oidDate:
		return 4, true
	case oidInt8, oidFloat8, oidTimestamp, oidTimestamptz:
		return 8, true
	case oidUUID:
		return 16, true
	}
	return 0, false
}

// appendText renders a value of the right width.
func appendText(dst []byte, typ uint32, v []byte) []byte {
	switch typ {
	case oidBool:
		if v[0] != 0 {
			return append(dst, 't')
		}
		return append(dst, 'f')
	case oidBytea:
		return hex.AppendEncode(append(dst, `\x`...), v)
	case oidUUID:
		return appendUUID(dst, v)
	case oidInt2:
		return strconv.AppendInt(dst, int64(int16(binary.BigEndian.Uint16(v))), 10)
	case oidInt4:
		return strconv.AppendInt(dst, int64(int32(binary.BigEndian.Uint32(v))), 10)
	case oidOID:
		return strconv.AppendUint(dst, uint64(binary.BigEndian.Uint32(v)), 10)
	case oidInt8:
		return strconv.AppendInt(dst, int64(binary.BigEndian.Uint64(v)), 10)
	case oidFloat4:
		return appendFloat(dst, float64(math.Float32frombits(binary.BigEndian.Uint32(v))), 32)
	case oidFloat8:
		return appendFloat(dst, math.Float64frombits(binary.BigEndian.Uint64(v)), 64)
	case oidDate:
		return appendDate(dst, int32(binary.BigEndian.Uint32(v)))
	default:
		return appendTimestamp(dst, int64(binary.BigEndian.Uint64(v)), typ == oidTimestamptz)
	}
}

func appendUUID(dst, v []byte) []byte {
	for i, end := range [...]int{4, 6, 8, 10, 16} {
		start := [...]int{0, 4, 6, 8, 10}[i]
		if i > 0 {
			dst = append(dst, '-')
		}
		dst = hex.AppendEncode(dst, v[start:end])
	}
	return dst
}

func appendDate(dst []byte, days int32) []byte {
	switch days {
	case math.MaxInt32:
		return append(dst, "infinity"...)
	case math.MinInt32:
		return append(dst, "-infinity"...)
	}
	t := time.Unix(epoch+int64(days)*86400, 0).UTC()
	dst = appendYMD(dst, t)
	return appendEra(dst, t)
}

func appendTimestamp(dst []byte, micros int64, zone bool) []byte {
	switch micros {
	case math.MaxInt64:
		return append(dst, "infinity"...)
	case math.MinInt64:
		return append(dst, "-infinity"...)
	}
	t := timestamp(micros)
	dst = appendYMD(dst, t)
	dst = t.AppendFormat(dst, " 15:04:05.999999")
	if zone {
		dst = append(dst, "+00"...)
	}
	return appendEra(dst, t)
}

// appendYMD writes the date with a year of at least four digits that counts
// from 1 in both directions.
func appendYMD(dst []byte, t time.Time) []byte {
	year := t.Year()
	if year <= 0 {
		year = 1 - year
	}
	for pad := 1000; pad > 1 && year < pad; pad /= 10 {
		dst = append(dst, '0')
	}
	dst = strconv.AppendInt(dst, int64(year), 10)
	return t.AppendFormat(dst, "-01-02")
}

func appendEra(dst []byte, t time.Time) []byte {
	if t.Year() <= 0 {
		return append(dst, " BC"...)
	}
	return dst
}
