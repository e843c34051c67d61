package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

const defaultConfigFile = "walpost.yaml"

// systemConfigFile is that of the packages, whose unit runs with it. A test has another.
var systemConfigFile = "/etc/walpost/walpost.yaml"

// configFile is the file to read: the one that is named, the one here, or "" for none. That of a package is
// read where no variable configures anything: what the environment says is of another relay.
func configFile(flags *pflag.FlagSet) (string, error) {
	path, err := flags.GetString("config")
	if err != nil || path != "" {
		return path, err
	}
	paths := []string{defaultConfigFile}
	if setVariable() == "" {
		paths = append(paths, systemConfigFile)
	}
	for _, path := range paths {
		switch _, err := os.Stat(path); {
		case err == nil:
			return path, nil
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR):
			return "", unreadable(err)
		}
	}
	return "", nil
}

// setVariable is a variable that configures something, "" for none.
func setVariable() string {
	for _, k := range defaultConfig().keys() {
		if _, ok := k.variable(os.LookupEnv); ok {
			return k.env
		}
	}
	return ""
}

func unreadable(err error) error {
	advice := "`walpost config example` prints a file to start from"
	if errors.Is(err, fs.ErrPermission) {
		advice = "run it as the relay's user, as in: " + asUser(packageUser, "walpost ...") +
			"; or name another file with --config"
	}
	return hint.Wrap(fmt.Errorf("read configuration: %w", err), advice)
}

// loader lays file, environment and flags over the defaults, in that order, and collects what is wrong on the
// way.
type loader struct {
	cfg *Config
	// origin says where a value that is not the default came from: "walpost.yaml:7", "WALPOST_SLOT" or
	// "--slot".
	origin   map[string]string
	problems problems
	read     string // the file, "" for no file
	bare     bool   // nothing is configured
}

// source says which file was read, or why none.
func (l *loader) source() string {
	if l.read != "" {
		return "file: " + l.read
	}
	text := "no file: " + defaultConfigFile + " does not exist here"
	if _, err := os.Stat(systemConfigFile); err == nil {
		text += ", and " + systemConfigFile + " is not read because " + setVariable() + " is set"
	}
	return text
}

// addConfigFlags gives the command --config and a flag for every key that has an environment variable. Its
// help leaves the keys' flags out: they are the same for every command, and `walpost help config` lists them.
func addConfigFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.String("config", "", "the configuration file (default "+defaultConfigFile+", or else "+
		systemConfigFile+"); its keys have flags, too: walpost help config")
	for _, k := range defaultConfig().keys() {
		f := flags.VarPF(&flagText{kind: flagKind(k.value)}, k.flag(), "", k.name+" ["+k.env+"]")
		f.DefValue = k.String()
		f.Hidden = true
		if _, ok := k.value.(boolValue); ok {
			f.NoOptDefVal = "true"
		}
	}
}

// ignoreConfigFlag takes --config for a command that reads no configuration: scripts give it to each command.
func ignoreConfigFlag(cmd *cobra.Command) {
	cmd.Flags().String("config", "", "")
	_ = cmd.Flags().MarkHidden("config") // it is there
}

func flagKind(v value) string {
	switch v.(type) {
	case boolValue:
		return "bool"
	case intValue:
		return "int"
	case durationValue:
		return "duration"
	case sizeValue:
		return "size"
	}
	return "string"
}

// flagText keeps a flag's text until the file and the environment were read: it is laid over them.
type flagText struct{ text, kind string }

func (f *flagText) Set(s string) error { f.text = s; return nil }
func (f *flagText) String() string     { return f.text }
func (f *flagText) Type() string       { return f.kind }

// loadConfig reads the configuration of a command and validates it. It warns where nothing is configured.
func loadConfig(cmd *cobra.Command) (*Config, error) {
	l, err := loadLocal(cmd)
	if err != nil {
		return nil, err
	}
	if l.bare {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: nothing is configured, and the defaults are used: "+
			"no %s here, no %s, no variable and no flag: `walpost init` writes a file\n",
			defaultConfigFile, systemConfigFile)
	}
	return l.cfg, nil
}

// loadLocal is loadConfig for a command that asks no server.
func loadLocal(cmd *cobra.Command) (*loader, error) {
	l, err := load(cmd.Flags())
	if err == nil {
		l.warn(cmd.ErrOrStderr())
	}
	return l, err
}

// warn names variables that look like one of walpost's and are none. They are no error: others may have set
// them for themselves.
func (l *loader) warn(w io.Writer) {
	for _, f := range l.cfg.strayVariables() {
		fmt.Fprintf(w, "warning: %s: %s\n", f.Text, f.Fix)
	}
}

func (c *Config) strayVariables() (found check.Findings) {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if h := c.meantVariable(name); h != "" {
			found.Warning("config-variable", h, "%s is not read", name)
		}
	}
	return found
}

// asVariable turns a key in capitals into the variable that somebody may expect for it.
var asVariable = strings.NewReplacer("[0]", "", ".", "_")

// meantVariable is a hint with the variable that somebody may have meant by another one.
func (c *Config) meantVariable(name string) string {
	const prefix = "WALPOST_"
	typed, ours := strings.CutPrefix(name, prefix)
	if !ours {
		return ""
	}
	var known []string
	for _, k := range c.keys() {
		if k.env == name {
			return ""
		}
		if k.env != "" && typed == asVariable.Replace(strings.ToUpper(k.name)) { // as the file calls it
			return fmt.Sprintf("did you mean %s?", k.env)
		}
		known = append(known, strings.TrimPrefix(k.env, prefix))
	}
	return strings.Replace(didYouMean(typed, known), "mean ", "mean "+prefix, 1)
}

func newLoader() *loader { return &loader{cfg: defaultConfig(), origin: map[string]string{}} }

func load(flags *pflag.FlagSet) (*loader, error) {
	l := newLoader()
	if err := l.file(flags); err != nil {
		return nil, &usageError{err}
	}
	l.over(flags)
	l.bare = l.read == "" && len(l.origin) == 0 && !libpqSpeaks()
	l.layouts()
	if l.origin["postgres.url"] == "" {
		switch {
		case l.cfg.Postgres.URLFile != "":
			l.cfg.Postgres.URL = ""
			l.origin["postgres.url"] = "in url_file"
		case libpqSpeaks():
			l.cfg.Postgres.URL = ""
			l.origin["postgres.url"] = "PG* variables"
		}
	}
	return l, l.finished()
}

// finished validates what was laid over each other, and returns everything that is wrong.
func (l *loader) finished() error {
	var invalid problems
	if errors.As(l.cfg.validate(l.origin), &invalid) {
		l.problems = append(l.problems, invalid...)
	}
	if len(l.problems) > 0 {
		return &usageError{l.problems}
	}
	return nil
}

// layouts gives outboxes of layout append the table and the mark that it is for, where nothing else is said.
func (l *loader) layouts() {
	for i := range l.cfg.Outboxes {
		o, at := &l.cfg.Outboxes[i], fmt.Sprintf("outboxes[%d].", i)
		if o.Layout.Columns != nil || o.Layout.Name != outbox.Append().Name {
			continue
		}
		if l.origin[at+"table"] == "" {
			o.Table = "public." + outbox.AppendTable
		}
		if l.origin[at+"mark"] == "" {
			o.Mark = MarkConfig{Name: string(outbox.MarkJournal)}
		}
	}
}

// libpqSpeaks tells whether libpq's variables say where the database is. PGUSER, PGPASSWORD and the like only
// complete a URL, which pgx does by itself.
func libpqSpeaks() bool {
	variables := []string{"PGHOST", "PGPORT", "PGDATABASE", "PGSERVICE"}
	return slices.ContainsFunc(variables, func(name string) bool {
		return os.Getenv(name) != ""
	})
}

func (l *loader) set(k key, text, origin string) {
	if err := k.Set(text); err != nil {
		l.problems = append(l.problems, problem(k.name, origin, err))
		return
	}
	l.origin[k.name] = origin
}

func (l *loader) environment(lookup func(string) (string, bool)) {
	for _, k := range l.cfg.keys() {
		if text, ok := k.variable(lookup); ok {
			l.set(k, text, k.env)
		}
	}
}

// variable is the value that the environment gives the key. An empty one is a value where it means something.
func (k key) variable(lookup func(string) (string, bool)) (string, bool) {
	text, ok := lookup(k.env)
	return text, ok && k.env != "" && (text != "" || emptyMeans[k.name])
}

func (l *loader) flags(flags *pflag.FlagSet) {
	for _, k := range l.cfg.keys() {
		if k.env == "" {
			continue
		}
		if f := flags.Lookup(k.flag()); f != nil && f.Changed {
			l.set(k, f.Value.String(), "--"+k.flag())
		}
	}
}

func (l *loader) file(flags *pflag.FlagSet) error {
	path, err := configFile(flags)
	if err != nil || path == "" {
		return err
	}
	file, err := os.Open(path)
	if err != nil {
		return unreadable(err)
	}
	defer file.Close() //nolint:errcheck // it is only read
	if path == defaultConfigFile && !flags.Changed("config") {
		info, err := file.Stat()
		if err == nil {
			err = checkImplicit(path, info)
		}
		if err != nil {
			return err
		}
	}
	data, err := io.ReadAll(file)
	if err != nil {
		return unreadable(err)
	}
	l.read = path
	return l.yaml(path, data)
}

func (l *loader) yaml(path string, data []byte) error {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var document yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil // an empty file
	} else if err != nil {
		return hint.Wrap(fmt.Errorf("read %s: %w", path, err),
			"indent with spaces, never with tabs; `walpost config example` prints a file to start from")
	}
	if err := decoder.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: more than one YAML document", path)
	}
	f := yamlFile{l, path}
	f.section("", document.Content[0])
	return nil
}

// yamlFile walks the nodes instead of decoding into the struct: only so do its errors name the key and the
// line, all of them at once.
type yamlFile struct {
	*loader
	path string
}

func (f yamlFile) at(n *yaml.Node) string { return fmt.Sprintf("%s:%d", f.path, n.Line) }

func (f yamlFile) fail(n *yaml.Node, advice, format string, args ...any) {
	f.problems = append(f.problems, hint.Errorf(advice, "%s: %s", f.at(n), fmt.Sprintf(format, args...)))
}

// section reads a mapping whose keys begin with prefix ("nats.").
func (f yamlFile) section(prefix string, n *yaml.Node) {
	n = resolve(n)
	if isNull(n) {
		return // "nats:" with everything under it commented out
	}
	if n.Kind != yaml.MappingNode {
		f.fail(n, "", "%s is not a mapping of keys",
			cmp.Or(strings.TrimSuffix(prefix, "."), "the configuration"))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], resolve(n.Content[i+1])
		name := prefix + k.Value
		if line, twice := seen[name]; twice {
			f.fail(k, "", "key %s is given twice, first in line %d", name, line)
			continue
		}
		seen[name] = k.Line
		f.entry(name, k, v)
	}
}

func (f yamlFile) entry(name string, k, v *yaml.Node) {
	if name == "outboxes" {
		f.outboxes(v)
		return
	}
	for _, known := range f.cfg.keys() {
		if known.name == name {
			f.leaf(known, v)
			return
		}
		if strings.HasPrefix(known.name, name+".") {
			f.section(name+".", v)
			return
		}
	}
	f.fail(k, f.suggest(name), "unknown key %s", name)
}

// suggest looks for the key that was meant: misspelt, or written in the wrong section.
func (f yamlFile) suggest(name string) string {
	var names []string
	for _, k := range f.cfg.keys() {
		names = append(names, k.name)
	}
	prefix, last := "", name
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		prefix, last = name[:i+1], name[i+1:]
	}
	var siblings []string
	for _, n := range names {
		if rest, ok := strings.CutPrefix(n, prefix); ok {
			sibling, _, _ := strings.Cut(rest, ".")
			sibling, _, _ = strings.Cut(sibling, "[")
			siblings = append(siblings, prefix+sibling)
		}
	}
	if h := didYouMean(name, siblings); h != "" {
		return h
	}
	for _, n := range names {
		if strings.HasSuffix(n, "."+last) {
			return fmt.Sprintf("did you mean %s?", n)
		}
	}
	return "`walpost config example` shows every key"
}

func (f yamlFile) outboxes(n *yaml.Node) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		f.fail(n, "write each outbox as an item, beginning with a dash: `- table: public.outbox_messages`",
			"outboxes is not a list")
		return
	}
	f.cfg.Outboxes = make([]OutboxConfig, len(n.Content))
	for i := range n.Content {
		f.cfg.Outboxes[i] = defaultOutbox()
	}
	for i, item := range n.Content {
		f.section(fmt.Sprintf("outboxes[%d].", i), item)
	}
}

func (f yamlFile) leaf(k key, n *yaml.Node) {
	if layout, ok := k.value.(layoutValue); ok && n.Kind == yaml.MappingNode {
		f.columns(k.name, layout.p, n)
		return
	}
	if v, ok := k.value.(nodeValue); ok && n.Kind != yaml.ScalarNode {
		if err := v.setNode(n); err != nil {
			f.fail(n, hint.Of(err), "%s: %v", k.name, err)
			return
		}
		f.origin[k.name] = f.at(n)
		return
	}
	if n.Kind != yaml.ScalarNode {
		f.fail(n, "", "%s is not a single value", k.name)
		return
	}
	if isNull(n) {
		f.fail(n, `write "" where it is to be empty, or leave the key out`, "%s has no value", k.name)
		return
	}
	f.set(k, n.Value, f.at(n))
}

func (f yamlFile) columns(name string, layout *LayoutConfig, n *yaml.Node) {
	columns := map[string]string{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		field, column := n.Content[i], resolve(n.Content[i+1])
		if column.Kind != yaml.ScalarNode || isNull(column) || column.Value == "" {
			f.fail(column, "leave out a field that the table has no column for",
				"%s.%s is not a column's name", name, field.Value)
			continue
		}
		columns[field.Value] = column.Value
	}
	*layout = LayoutConfig{Columns: columns}
	f.origin[name] = f.at(n)
}

func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }
