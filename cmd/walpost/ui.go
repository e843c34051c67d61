package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/console"
	"github.com/walpost/walpost/internal/hint"
)

func newUICommand() *cobra.Command {
	var address, relay string
	cmd := &cobra.Command{
		Use: "ui", Short: "Serve the console to a browser on this machine", Long: help("ui"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			base, err := relayURL(relay, cfg.HTTP.Listen)
			if err != nil {
				return err
			}
			return serveUI(cmd, cfg, address, base)
		},
	}
	cmd.Flags().StringVar(&address, "listen", "127.0.0.1:0", "a loopback address; port 0 takes a free one")
	cmd.Flags().StringVar(&relay, "relay", "", "where the relay's HTTP server is; default: http.listen")
	addConfigFlags(cmd)
	return cmd
}

func serveUI(cmd *cobra.Command, cfg *Config, address, relay string) error {
	log, err := newLogger(cfg.Log, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // standard error is not buffered, and a terminal refuses to be synced
	config, err := consoleConfig(cfg, "walpost ui", log)
	if err != nil {
		return err
	}
	config.Token = rand.Text()
	config.Relay, config.Metrics = console.RelayAt(relay)
	ui := console.New(config)
	server := newUIServer(ui, log)
	ln, err := listenUI(cmd.Context(), address)
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "http://%s/ui/#token=%s\n", ln.Addr(), config.Token)
	fmt.Fprintln(cmd.ErrOrStderr(), "open this address in a browser on this machine; Ctrl-C ends the console")
	return (&httpServer{server: server, ln: ln, ui: ui}).Run(cmd.Context())
}

func newUIServer(ui http.Handler, log *zap.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("/ui/", ui)
	mux.Handle("GET /{$}", http.RedirectHandler("/ui/", http.StatusFound))
	return newServer(mux, log)
}

// listenUI refuses every address but this machine's: the token would pass in the clear.
func listenUI(ctx context.Context, address string) (net.Listener, error) {
	const advice = "give 127.0.0.1:PORT; from another machine: ssh -L PORT:127.0.0.1:PORT"
	host, _, err := net.SplitHostPort(address)
	if err != nil || checkListen(address) != nil {
		return nil, &usageError{hint.Errorf(advice, "--listen: %q is no address", address)}
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, &usageError{hint.Errorf(advice, "--listen: %s is not a loopback address", address)}
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", address)
	return ln, hint.Wrap(err, "give another port with --listen")
}

// relayURL is where the relay's HTTP server is; empty where it has none.
func relayURL(flag, listen string) (string, error) {
	if flag == "" && listen == "" {
		return "", nil
	}
	if flag == "" {
		host, port, err := net.SplitHostPort(listen)
		if err != nil {
			return "", err // it was checked when it was read
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		return "http://" + net.JoinHostPort(host, port), nil
	}
	u, err := url.Parse(flag)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", &usageError{hint.Errorf("as in http://127.0.0.1:9464", "--relay: %q is no URL", flag)}
	}
	return strings.TrimSuffix(u.Scheme+"://"+u.Host+cmp.Or(u.Path, "/"), "/"), nil
}

// newServer is an HTTP server as walpost has them.
func newServer(handler http.Handler, log *zap.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ConnState:         (&connLimit{most: httpConnections}).track,
		ReadHeaderTimeout: httpTimeout,
		ReadTimeout:       httpTimeout,
		WriteTimeout:      2 * httpTimeout,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          zap.NewStdLog(log.Named("http")),
	}
}
