package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// value is one configurable field, wherever its text comes from.
type value interface {
	// Set takes the text over or leaves the field as it was. It checks the form only.
	Set(text string) error
	// String is the text that Set would take for the present value.
	String() string
	// Check tells what is wrong with the present value.
	Check() error
	// Kind says what can be set, for the help: a word, or the choices or limits.
	Kind() string
}

type stringValue struct {
	p      *string
	check  func(string) error
	redact func(string) string
}

func (v stringValue) Set(text string) error { *v.p = text; return nil }
func (v stringValue) String() string        { return *v.p }
func (v stringValue) Kind() string          { return "string" }

func (v stringValue) Check() error {
	if v.check == nil {
		return nil
	}
	return v.check(*v.p)
}

type choiceValue struct {
	p       *string
	choices []string // an empty one stands for "not said"
}

func (v choiceValue) Set(text string) error { *v.p = text; return nil }
func (v choiceValue) String() string        { return *v.p }

func (v choiceValue) Kind() string {
	named := slices.DeleteFunc(slices.Clone(v.choices), func(s string) bool { return s == "" })
	return strings.Join(named, " | ")
}

func (v choiceValue) Check() error {
	if slices.Contains(v.choices, *v.p) {
		return nil
	}
	return hint.Errorf(didYouMean(*v.p, v.choices), "%q is not one of %s", *v.p, v.Kind())
}

type boolValue struct{ p *bool }

func (v boolValue) String() string { return strconv.FormatBool(*v.p) }
func (v boolValue) Kind() string   { return "true | false" }
func (v boolValue) Check() error   { return nil }

func (v boolValue) Set(text string) error {
	b, err := strconv.ParseBool(text)
	if err != nil {
		return fmt.Errorf("%q is neither true nor false", text)
	}
	*v.p = b
	return nil
}

type intValue struct {
	p        *int
	min, max int
}

func (v intValue) String() string { return strconv.Itoa(*v.p) }
func (v intValue) Kind() string   { return fmt.Sprintf("%d to %d", v.min, v.max) }
func (v intValue) Check() error   { return within(*v.p, v.min, v.max, v) }

func (v intValue) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil {
		return fmt.Errorf("%q is not a whole number", text)
	}
	*v.p = n
	return nil
}

type ratioValue struct{ p *float64 }

func (v ratioValue) String() string { return strconv.FormatFloat(*v.p, 'f', -1, 64) }
func (v ratioValue) Kind() string   { return "0 to 1" }

func (v ratioValue) Check() error {
	if *v.p >= 0 && *v.p <= 1 {
		return nil
	}
	return fmt.Errorf("%s is out of range: want %s", v.String(), v.Kind())
}

func (v ratioValue) Set(text string) error {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return hint.Errorf("write a part of 1, as in 0.01", "%q is not a number", text)
	}
	*v.p = f
	return nil
}

type durationValue struct {
	p        *time.Duration
	min, max time.Duration
}

func (v durationValue) String() string { return formatDuration(*v.p) }
func (v durationValue) Kind() string {
	return fmt.Sprintf("%s to %s", formatDuration(v.min), formatDuration(v.max))
}
func (v durationValue) Check() error { return within(*v.p, v.min, v.max, v) }

func (v durationValue) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil {
		return hint.Errorf("write a number and a unit of ms, s, m or h, "+
			"as in 500ms, 30s, 1m30s or 168h (7 days)",
			"%q is not a duration", text)
	}
	*v.p = d
	return nil
}

// optionalDuration is a duration or 0, which is off.
type optionalDuration struct{ durationValue }

func (v optionalDuration) Kind() string { return "0s, or " + v.durationValue.Kind() }

func (v optionalDuration) Check() error {
	if *v.p == 0 {
		return nil
	}
	return within(*v.p, v.min, v.max, v)
}

// formatDuration leaves out the zero units that time.Duration writes: 168h and not 168h0m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

type sizeValue struct {
	p        *int64
	min, max int64
}

func (v sizeValue) String() string { return formatSize(*v.p) }
func (v sizeValue) Kind() string {
	return fmt.Sprintf("%s to %s", formatSize(v.min), formatSize(v.max))
}
func (v sizeValue) Check() error { return within(*v.p, v.min, v.max, v) }

func (v sizeValue) Set(text string) error {
	n, err := parseSize(text)
	if err != nil {
		return err
	}
	*v.p = n
	return nil
}

func within[T cmp.Ordered](n, least, most T, v value) error {
	if n < least || n > most {
		return fmt.Errorf("%s is out of range, want %s", v, v.Kind())
	}
	return nil
}

var sizeUnits = []struct {
	name  string
	bytes int64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"KB", 1e3},
	{"B", 1},
}

var sizeForm = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)$`)

func parseSize(text string) (int64, error) {
	m := sizeForm.FindStringSubmatch(text)
	unit := int64(0)
	if m != nil {
		unit = sizeUnit(m[2])
	}
	if unit == 0 {
		return 0, hint.Errorf("write a number of bytes, or a number with KB, MB, GB, TB (powers of 1000) "+
			"or KiB, MiB, GiB, TiB (powers of 1024)",
			"%q is not a size", text)
	}
	// A whole number of bytes does not go through a float, which would round it.
	if n, err := strconv.ParseInt(m[1], 10, 64); err == nil && n <= math.MaxInt64/unit {
		return n * unit, nil
	}
	f, err := strconv.ParseFloat(m[1], 64)
	if err != nil || f*float64(unit) >= math.MaxInt64 {
		return 0, fmt.Errorf("%q is too large", text)
	}
	return int64(f * float64(unit)), nil
}

// sizeUnit is 0 where the unit is unknown.
func sizeUnit(name string) int64 {
	if name == "" {
		return 1
	}
	for _, u := range sizeUnits {
		if strings.EqualFold(u.name, name) {
			return u.bytes
		}
	}
	return 0
}

// formatSize uses the unit that leaves the smallest whole number.
func formatSize(n int64) string {
	best, bestText := n, strconv.FormatInt(n, 10)
	for _, u := range sizeUnits {
		if n%u.bytes == 0 && n/u.bytes < best {
			best, bestText = n/u.bytes, strconv.FormatInt(n/u.bytes, 10)+u.name
		}
	}
	return bestText
}

type layoutValue struct{ p *LayoutConfig }

// Set takes a name, or a map as in id=id,event_type=kind,payload=body.
func (v layoutValue) Set(text string) error {
	if !strings.Contains(text, "=") {
		*v.p = LayoutConfig{Name: text}
		return nil
	}
	columns := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		field, column, ok := strings.Cut(pair, "=")
		field, column = strings.TrimSpace(field), strings.TrimSpace(column)
		if !ok || field == "" || column == "" {
			return hint.Errorf("write field=column, joined by commas, "+
				"as in id=id,event_type=kind,payload=body",
				"%q maps no field to a column", strings.TrimSpace(pair))
		}
		if columns[field] != "" {
			return fmt.Errorf("field %q is mapped twice", field)
		}
		columns[field] = column
	}
	*v.p = LayoutConfig{Columns: columns}
	return nil
}

func (v layoutValue) Kind() string {
	return strings.Join(outbox.LayoutNames(), " | ") + " | map of columns"
}

func (v layoutValue) Check() error {
	_, err := v.p.resolve()
	return err
}

func (v layoutValue) String() string {
	if v.p.Columns == nil {
		return v.p.Name
	}
	var pairs []string
	for _, f := range slices.Sorted(maps.Keys(v.p.Columns)) {
		pairs = append(pairs, fmt.Sprintf("%s: %s", f, scalar(v.p.Columns[f])))
	}
	return "{" + strings.Join(pairs, ", ") + "}"
}

// scalar renders a text so that YAML reads it back as the same string.
func scalar(s string) string {
	b, err := yaml.Marshal(s)
	if err != nil {
		return strconv.Quote(s) // cannot happen with a string
	}
	return strings.TrimSuffix(string(b), "\n")
}

// redacted is the text to show: without secrets.
func redacted(v value) string {
	if s, ok := v.(stringValue); ok && s.redact != nil {
		return s.redact(*s.p)
	}
	return v.String()
}

const secret = "xxxxx"

var (
	// Up to the last @: a password that was not percent-encoded may hold anything.
	userinfo = regexp.MustCompile(`://.*@`)
	// A value of keywords and values, where a backslash takes a space into it, and one of a URL's parameters.
	inKeywords = regexp.MustCompile(`([^\s=]+)(\s*=\s*)('(?:[^'\\]|\\.)*'|(?:[^\s\\]|\\.)+)`)
	inURL      = regexp.MustCompile(`([^\s=&?]+)(=)([^&]+)`)
	// The parameters of a connection whose values are shown. Any other may be a mistyped password.
	shown = regexp.MustCompile(`^(host|hostaddr|port|dbname|database|user|passfile|service|servicefile|` +
		`connect_timeout|ssl(mode|cert|key|rootcert|negotiation|sni|certmode)|channel_binding|require_auth|` +
		`krbsrvname|krbspn|target_session_attrs|application_name|options|search_path|timezone|\w+_timeout|` +
		`default_query_exec_mode|(min|max)_protocol_version)$`)
)

// redactPostgres hides the password of a URL or of a keyword/value string, and every value that may be one.
func redactPostgres(s string) string {
	s = userinfo.ReplaceAllStringFunc(s, func(m string) string {
		user, _, found := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(m, "://"), "@"), ":")
		if !found {
			return m
		}
		return "://" + user + ":" + secret + "@"
	})
	parameter := inKeywords
	if strings.HasPrefix(s, "postgres://") || strings.HasPrefix(s, "postgresql://") {
		parameter = inURL
	}
	return parameter.ReplaceAllStringFunc(s, func(m string) string {
		parts := parameter.FindStringSubmatch(m)
		if shown.MatchString(parts[1]) {
			return m
		}
		return parts[1] + parts[2] + secret
	})
}

// redactNATS hides user, password and token of each server, and everything where that cannot be told apart.
func redactNATS(s string) string {
	urls, err := jetstream.ParseURLs(s)
	if err != nil {
		return secret
	}
	servers := make([]string, len(urls))
	for i, u := range urls {
		if _, isUser := u.User.Password(); u.User != nil && !isUser {
			u.User = url.User(secret) // a token
		}
		servers[i] = u.Redacted()
	}
	return strings.Join(servers, ",")
}
