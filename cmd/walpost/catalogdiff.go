package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
)

func newCatalogDiffCommand() *cobra.Command {
	var newest int
	var asJSON bool
	cmd := &cobra.Command{
		Use: "diff [DIR]", Short: "Compare the catalogue with table and stream",
		Long: help("catalog diff"), Args: oneDir,
		RunE: func(cmd *cobra.Command, args []string) error {
			if newest < 1 || newest > mostNewest {
				return &usageError{hint.Errorf(fmt.Sprintf("want 1 to %d", mostNewest),
					"--newest: %d", newest)}
			}
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			events, err := loadCatalog(dirOf(args, cfg.Catalog.Path))
			if err != nil {
				return err
			}
			d := catalogDiff{seen: map[eventKey]*seenType{}, newest: newest}
			if err := d.look(cmd.Context(), cfg, events); err != nil {
				return err
			}
			return d.tell(cmd.OutOrStdout(), asJSON)
		},
	}
	cmd.Flags().IntVar(&newest, "newest", 10_000, "how many of the newest rows and messages are looked at")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

const mostNewest = 1_000_000

// eventKey is an event type and version, "" where no version is known.
type eventKey struct{ name, version string }

// seenType is what was seen of an event type and version.
type seenType struct {
	EventType string `json:"event_type"`
	Version   *int   `json:"version"` // null: the subject does not tell it
	Rows      int    `json:"rows"`    // among the newest of all tables
	Messages  uint64 `json:"messages"`
	Known     bool   `json:"in_catalog"`
}

// catalogDiff is the report.
type catalogDiff struct {
	newest int
	seen   map[eventKey]*seenType

	Seen   []*seenType `json:"seen"`
	Unseen []string    `json:"never_seen"` // entries
	Notes  []string    `json:"notes"`
}

func (d *catalogDiff) look(ctx context.Context, cfg *Config, events *catalog.Catalog) error {
	if err := d.lookAtTables(ctx, cfg); err != nil {
		return err
	}
	if err := d.lookAtStream(ctx, cfg); err != nil {
		return err
	}
	for key, one := range d.seen {
		if one.Known = events.Knows(key.name); one.Version != nil {
			one.Known = events.Find(key.name, *one.Version) != nil
		}
		d.Seen = append(d.Seen, one)
	}
	slices.SortFunc(d.Seen, func(a, b *seenType) int {
		return cmp.Or(cmp.Compare(a.EventType, b.EventType), cmp.Compare(versionOf(a), versionOf(b)))
	})
	for _, e := range events.Entries() {
		// Of older messages the version is not known: it may be this one.
		if d.seen[eventKey{e.Name, strconv.Itoa(e.Version)}] == nil && d.seen[eventKey{e.Name, ""}] == nil {
			d.Unseen = append(d.Unseen, e.String())
		}
	}
	return nil
}

// atoi is -1, which no catalogue has, where the text is no number.
func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}

func versionOf(s *seenType) int {
	if s.Version == nil {
		return 0
	}
	return *s.Version
}

// at is the line of a type and version; told says that no version means 1, as rows and messages mean it.
func (d *catalogDiff) at(name, version string, told bool) *seenType {
	if told {
		version = cmp.Or(version, "1")
	}
	key := eventKey{name, version}
	if d.seen[key] == nil {
		d.seen[key] = &seenType{EventType: name}
		if told {
			n := atoi(version)
			d.seen[key].Version = &n
		}
	}
	return d.seen[key]
}

func (d *catalogDiff) lookAtTables(ctx context.Context, cfg *Config) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	db, err := openLook(ctx, cfg, "walpost catalog diff")
	if err != nil {
		return err
	}
	defer db.Close()
	for _, t := range tables {
		types, err := db.EventTypes(ctx, t, d.newest)
		if err != nil {
			return hint.Wrap(err, "GRANT SELECT on the table to the role; look at fewer rows with --newest; "+
				"without an index on the id's column a large table takes too long")
		}
		for _, one := range types {
			d.at(one.EventType, one.Version, true).Rows += one.Rows
		}
	}
	return nil
}

func (d *catalogDiff) lookAtStream(ctx context.Context, cfg *Config) error {
	s, template, done, err := openStream(ctx, cfg, "walpost catalog diff")
	if err != nil {
		return err
	}
	defer done()
	info, err := s.Info(ctx)
	if err != nil {
		return s.ExplainFollow(err)
	}
	if info.Messages == 0 {
		return nil
	}
	from := max(info.FirstSeq, info.LastSeq-min(info.LastSeq, uint64(d.newest))+1)
	types, err := s.EventTypes(ctx, from, info.LastSeq, template.Pattern())
	if err != nil {
		return s.ExplainFollow(err)
	}
	for one, n := range types {
		d.at(one.EventType, one.Version, true).Messages += uint64(n)
	}
	return d.lookAtSubjects(ctx, s, cfg.NATS.Subject, template.Pattern())
}

// lookAtSubjects adds the types that only older messages have, where the subject tells the type and little
// else.
func (d *catalogDiff) lookAtSubjects(ctx context.Context, s *jetstream.Stream, subject, filter string) error {
	before, told := strings.CutSuffix(subject, "{event_type}")
	if strings.Contains(strings.TrimPrefix(before, "{partition/"), "{") || !told {
		d.Notes = append(d.Notes, fmt.Sprintf("the subject does not tell the type: "+
			"of the stream, the newest %d messages were looked at", d.newest))
		return nil
	}
	subjects, err := s.Subjects(ctx, filter)
	if err != nil {
		return err
	}
	total := map[string]uint64{}
	tokens := strings.Count(before, ".")
	for subject, n := range subjects {
		if parts := strings.SplitN(subject, ".", tokens+1); len(parts) > tokens {
			total[parts[tokens]] += n
		}
	}
	for name, n := range total {
		if counted := d.counted(name); n > counted {
			d.at(name, "", false).Messages += n - counted
		}
	}
	return nil
}

// counted are the messages of a type whose version was read.
func (d *catalogDiff) counted(name string) (n uint64) {
	for key, one := range d.seen {
		if key.name == name {
			n += one.Messages
		}
	}
	return n
}

func (d *catalogDiff) tell(w io.Writer, asJSON bool) error {
	unknown := 0
	for _, one := range d.Seen {
		if !one.Known {
			unknown++
		}
	}
	if err := d.print(w, asJSON); err != nil {
		return err
	}
	if unknown > 0 {
		return hint.Errorf("add an entry for each, or correct the producer",
			"not in the catalogue: %s", count(unknown, "event version"))
	}
	return nil
}

func (d *catalogDiff) print(w io.Writer, asJSON bool) error {
	if asJSON {
		d.Seen, d.Unseen = append([]*seenType{}, d.Seen...), append([]string{}, d.Unseen...)
		d.Notes = append([]string{}, d.Notes...)
		return printIndented(w, d)
	}
	fmt.Fprintf(w, "%-40s %7s %10s %12s  %s\n", "EVENT TYPE", "VERSION", "ROWS", "MESSAGES", "CATALOGUE")
	for _, one := range d.Seen {
		version, known := "older", "missing"
		if one.Version != nil {
			version = strconv.Itoa(*one.Version)
		}
		if one.Known {
			known = "yes"
		}
		fmt.Fprintf(w, "%-40s %7s %10d %12d  %s\n",
			escape(one.EventType), version, one.Rows, one.Messages, known)
	}
	printLines(w, "never seen: %s", d.Unseen)
	printLines(w, "note: %s", d.Notes)
	return nil
}
