package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/publish"
)

func newCatalogDocsCommand() *cobra.Command {
	var out, title, version string
	cmd := &cobra.Command{
		Use: "docs [DIR]", Short: "Write event-catalog.md and asyncapi.yaml",
		Long: help("catalog docs"), Args: oneDir,
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := loadLocal(cmd)
			if err != nil {
				return err
			}
			cfg, dir := l.cfg, dirOf(args, l.cfg.Catalog.Path)
			events, err := loadCatalog(dir)
			if err == nil {
				err = checkOut(dir, out)
			}
			if err != nil {
				return err
			}
			asyncAPI, err := events.AsyncAPI(catalog.AsyncAPIOptions{
				Title: title, Version: version, Subject: cfg.NATS.Subject,
				Enveloped: publish.Format(cfg.NATS.Format) == publish.FormatCloudEvents,
			})
			if err != nil {
				return err
			}
			files := map[string][]byte{"event-catalog.md": events.Markdown(), "asyncapi.yaml": asyncAPI}
			if err := writeFiles(out, files); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "wrote event-catalog.md and asyncapi.yaml to %s\n", out)
			return err
		},
	}
	cmd.Flags().StringVar(&out, "out", "docs", "the directory to write to")
	cmd.Flags().StringVar(&title, "title", "Events", "the title of the AsyncAPI document")
	cmd.Flags().StringVar(&version, "api-version", "1", "the version of the AsyncAPI document")
	addConfigFlags(cmd)
	return cmd
}

// checkOut keeps asyncapi.yaml out of the catalogue, where it would be read as an entry.
func checkOut(dir, out string) error {
	inside, err := filepath.Abs(out)
	if err != nil {
		return err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	relative, err := filepath.Rel(dir, inside)
	if err == nil && relative != ".." && !strings.HasPrefix(relative, ".."+string(filepath.Separator)) {
		return &usageError{hint.Errorf("name a directory outside of the catalogue",
			"--out: %s is in the catalogue, whose *.yaml files are entries", out)}
	}
	return nil
}

func writeFiles(dir string, files map[string][]byte) error {
	err := os.MkdirAll(dir, 0o755)
	for name, text := range files {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
	}
	if err != nil {
		return hint.Errorf("name a directory that you may write to with --out", "write documents: %w", err)
	}
	return nil
}
