package main

import (
	"errors"
	"path/filepath"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

func (c *Config) catalogKeys() []key {
	return []key{
		{
			"catalog.path", "WALPOST_CATALOG", "",
			stringValue{p: &c.Catalog.Path},
			"The directory of the event catalogue, read at start. A row whose payload does not fit its " +
				"schema there is parked (class schema). Empty is off.",
		},
		{
			"catalog.unknown", "WALPOST_CATALOG_UNKNOWN", "allow",
			choiceValue{&c.Catalog.Unknown, []string{"allow", "park"}},
			"What happens to a row whose event type or event version the catalogue does not have: " +
				"it is sent (allow) or parked (park).",
		},
	}
}

// eventCheck is what the relay asks about each row; nil without a catalogue.
func eventCheck(c *CatalogConfig) (func(*outbox.Event) error, error) {
	if c.Path == "" {
		return nil, nil
	}
	events, err := catalog.LoadDir(c.Path)
	if err != nil {
		return nil, &usageError{catalogErrors(c.Path, err)}
	}
	return func(ev *outbox.Event) error { return events.CheckEvent(ev, c.Unknown == "park") }, nil
}

// catalogErrors are all problems, with the paths of their files, as errors with hints and codes.
func catalogErrors(dir string, err error) error {
	var found catalog.Problems
	if !errors.As(err, &found) {
		return err
	}
	var all problems
	for _, p := range found {
		all = append(all, catalogError(dir, p))
	}
	return all
}

func catalogError(dir string, p catalog.Problem) error {
	if p.File = filepath.Join(dir, p.File); p.File == filepath.Clean(dir) {
		p.Line = 0
	}
	return hint.Coded(p.Code, hint.Errorf(p.Fix, "%s", p.Error()))
}

// catalogFindings are problems as `walpost doctor` prints findings.
func catalogFindings(dir string, problems catalog.Problems) (found check.Findings) {
	levels := map[catalog.Level]check.Level{catalog.Error: check.Error, catalog.Warn: check.Warn}
	for _, p := range problems {
		found.Failed(levels[p.Level], "catalog", catalogError(dir, p))
	}
	return found
}

// examineCatalog says what a start would refuse.
func examineCatalog(c *CatalogConfig) (found check.Findings) {
	if c.Path == "" {
		return nil
	}
	events, err := catalog.LoadDir(c.Path)
	var problems catalog.Problems
	if errors.As(err, &problems) {
		return catalogFindings(c.Path, problems)
	}
	if err != nil {
		found.Failed(check.Error, "catalog", err)
		return found
	}
	found.Note("catalog", "", "%s has %s", c.Path, count(len(events.Entries()), "event version"))
	return found
}
