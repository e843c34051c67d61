package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
)

// catalogDir is where a catalogue is, unless an argument or catalog.path says otherwise.
const catalogDir = "catalog"

func newCatalogCommand() *cobra.Command {
	return newGroup("catalog", "Check the event catalogue, compare it, write its documents", help("catalog"),
		newCatalogCheckCommand(), newCatalogDiffCommand(), newCatalogDocsCommand())
}

// oneDir takes at most one argument.
var oneDir = atMostOneArg("directory", "name one directory")

// dirOf is the directory that a command's argument or the configuration names.
func dirOf(args []string, configured string) string {
	if len(args) > 0 {
		return args[0]
	}
	return cmp.Or(configured, catalogDir)
}

func newCatalogCheckCommand() *cobra.Command {
	var against, ref string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "check [DIR]", Short: "Check names, owners, schemas and breaking changes",
		Long: help("catalog check"), Args: oneDir,
		RunE: func(cmd *cobra.Command, args []string) error {
			if against != "" && ref != "" {
				return &usageError{hint.Errorf("leave one of them out", "--against excludes --against-ref")}
			}
			l, err := loadLocal(cmd)
			if err != nil {
				return err
			}
			found, err := checkCatalog(cmd.Context(), dirOf(args, l.cfg.Catalog.Path), against, ref)
			if err != nil {
				return err
			}
			return tellFindings(cmd.OutOrStdout(), check.InOrder(found), asJSON)
		},
	}
	cmd.Flags().StringVar(&against, "against", "", "compare with the catalogue in this directory")
	cmd.Flags().StringVar(&ref, "against-ref", "", "compare with DIR in this commit or branch of Git")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	addConfigFlags(cmd)
	return cmd
}

func checkCatalog(ctx context.Context, dir, against, ref string) (check.Findings, error) {
	fsys, err := catalog.OpenDir(dir)
	if err != nil {
		return nil, err
	}
	now, problems := catalog.Check(fsys)
	found := catalogFindings(dir, problems)
	var old fs.FS
	switch {
	case against != "":
		old, err = catalog.OpenDir(against)
	case ref != "":
		old, err = gitTree(ctx, dir, ref)
	}
	if errors.Is(err, errNotInCommit) {
		found.Note("catalog-new", "", "%s has no %s: nothing was compared", ref, dir)
		return found, nil
	}
	if err != nil || old == nil {
		return found, err
	}
	before, wrong := catalog.Check(old)
	if len(before.Entries()) == 0 {
		return nil, hint.Errorf("compare with a state of the catalogue that could be read",
			"the catalogue of %s has no entry: %w", cmp.Or(against, ref), wrong)
	}
	return append(found, catalogFindings(dir, catalog.Compare(before, now))...), nil
}

// loadCatalog reads a catalogue for a command that needs a whole one.
func loadCatalog(dir string) (*catalog.Catalog, error) {
	events, err := catalog.LoadDir(dir)
	if err != nil {
		return nil, catalogErrors(dir, err)
	}
	return events, nil
}

func printLines(w io.Writer, format string, all []string) {
	for _, one := range all {
		fmt.Fprintf(w, format+"\n", one)
	}
}
