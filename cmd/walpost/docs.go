package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/site"
)

func newDocsCommand() *cobra.Command {
	var listen, out string
	cmd := &cobra.Command{
		Use: "docs", Short: "Show the documentation of this version in a browser",
		Long: help("docs"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" && !cmd.Flags().Changed("out") {
				return serveDocs(cmd, listen)
			}
			if cmd.Flags().Changed("listen") {
				return &usageError{hint.Errorf("leave out one of them",
					"--out writes files, and --listen serves them")}
			}
			return writeDocs(cmd, out)
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "the address to serve on; port 0: any free one")
	cmd.Flags().StringVar(&out, "out", "", "write the pages to this directory instead")
	ignoreConfigFlag(cmd)
	return cmd
}

// documentation is the site of this build.
func documentation() *site.Site {
	b := buildVersion()
	return site.New(walpost.Documents, b.Version, b.Revision)
}

func writeDocs(cmd *cobra.Command, dir string) error {
	if dir == "" {
		return &usageError{hint.Errorf("name a directory, such as --out walpost-docs", "--out is empty")}
	}
	n, err := documentation().Write(dir)
	if err != nil {
		return hint.Wrap(err, "name a directory that you may write to with --out")
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "wrote %d files: open %s\n", n, filepath.Join(dir, "index.html"))
	return err
}

func serveDocs(cmd *cobra.Command, listen string) error {
	const advice = "name a free address with --listen, such as 127.0.0.1:8080"
	if _, _, err := net.SplitHostPort(listen); err != nil {
		return &usageError{hint.Wrap(fmt.Errorf("--listen: %w", err), advice)}
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(cmd.Context(), "tcp", listen)
	if err != nil {
		return hint.Wrap(fmt.Errorf("listen for HTTP: %w", err), advice)
	}
	server := &http.Server{Handler: documentation().Handler(), ReadHeaderTimeout: httpTimeout}
	stop := context.AfterFunc(cmd.Context(), func() { _ = server.Close() }) // there is nothing to drain
	defer stop()
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "http://%s/\n", ln.Addr()); err != nil {
		return errors.Join(err, ln.Close())
	}
	if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve documents: %w", err)
	}
	return nil
}
