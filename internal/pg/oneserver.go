package pg

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
)

// Met is a server as a connection has met it.
type Met struct {
	Address  string    `json:"address"`  // as it was dialled
	Timeline uint32    `json:"timeline"` // 0: a standby
	Started  time.Time `json:"started"`  // the postmaster, which no two servers were in the same microsecond
}

func (m Met) String() string {
	at := m.Started.Format(time.RFC3339Nano)
	return fmt.Sprintf("%s (timeline %d, started %s)", m.Address, m.Timeline, at)
}

// metKey is where a connection keeps its Met, without the address.
const metKey = "walpost.met"

// AnotherServer is the error of a connection that reached another server than the first one did.
type AnotherServer struct{ First, Now Met }

func (e *AnotherServer) Error() string {
	return fmt.Sprintf("connected to %v, and not to %v as before", e.Now, e.First)
}

// OneServer keeps all connections of the configurations that share it on one server: the one that the first
// connection reached, at the address that it was reached at. Where another server answers there, by a name,
// an address or a proxy that has moved, the connection fails with [AnotherServer]. It is safe for concurrent
// use.
type OneServer struct {
	other chan error

	mu   sync.Mutex
	met  Met
	host string // of the URL; met's address is one of its addresses
}

// NewOneServer has met none.
func NewOneServer() *OneServer { return &OneServer{other: make(chan error, 1)} }

// Other has the first reason why a connection cannot be to the server: it met another one, or the URL, which
// may stand in a file, does not name it any more.
func (o *OneServer) Other() <-chan error { return o.other }

// Met is the server; its zero value is none.
func (o *OneServer) Met() Met {
	if o == nil {
		return Met{}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.met
}

// confine has the configuration's connections go to the server.
func (o *OneServer) confine(cfg *pgconn.Config) error {
	o.mu.Lock()
	met, host := o.met, o.host
	o.mu.Unlock()
	if met.Address != "" {
		if err := keep(cfg, met.Address, host); err != nil {
			return o.tell(err)
		}
	}
	var mu sync.Mutex
	hosts := map[string]string{}   // by the addresses that they have
	dialled := map[string]string{} // by the connections' own ends: an attempt that failed may dial once more
	lookup, dial, validate := cfg.LookupFunc, cfg.DialFunc, cfg.ValidateConnect
	cfg.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		found, err := lookup(ctx, host)
		mu.Lock()
		defer mu.Unlock()
		for _, address := range found {
			hosts[address] = host
		}
		return found, err
	}
	cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			dialled[conn.LocalAddr().String()] = address
		}
		return conn, err
	}
	cfg.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		if validate != nil {
			if err := validate(ctx, conn); err != nil {
				return err
			}
		}
		now, ok := conn.CustomData()[metKey].(Met)
		if !ok {
			return nil // it only looks for a pooler, see prove
		}
		mu.Lock()
		now.Address = dialled[conn.Conn().LocalAddr().String()]
		host := hosts[now.Address]
		if ip, _, err := net.SplitHostPort(now.Address); err == nil && host == "" {
			host = hosts[ip]
		}
		mu.Unlock()
		return o.meet(now, host)
	}
	return nil
}

func (o *OneServer) meet(now Met, host string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.met == (Met{}) {
		o.met, o.host = now, host
	}
	if o.met == now {
		return nil
	}
	return o.tell(&AnotherServer{o.met, now})
}

func (o *OneServer) tell(err error) error {
	select {
	case o.other <- err:
	default:
	}
	return err
}

// keep has a configuration know one address only, and the host that has it: a certificate is for its name.
func keep(cfg *pgconn.Config, address, host string) error {
	first := pgconn.FallbackConfig{Host: cfg.Host, Port: cfg.Port, TLSConfig: cfg.TLSConfig}
	all := append([]*pgconn.FallbackConfig{&first}, cfg.Fallbacks...)
	ip, port, err := net.SplitHostPort(address)
	if err != nil {
		ip = ""
	}
	all = slices.DeleteFunc(all, func(f *pgconn.FallbackConfig) bool {
		_, path := pgconn.NetworkAddress(f.Host, f.Port)
		return path != address && (ip == "" || f.Host != host || strconv.Itoa(int(f.Port)) != port)
	})
	if len(all) == 0 {
		return hint.Errorf("it has changed: the relay takes the new one in its next term",
			"postgres.url does not name %s any more", address)
	}
	cfg.Host, cfg.Port, cfg.TLSConfig, cfg.Fallbacks = all[0].Host, all[0].Port, all[0].TLSConfig, all[1:]
	if ip != "" {
		cfg.LookupFunc = func(context.Context, string) ([]string, error) { return []string{ip}, nil }
	}
	return nil
}
