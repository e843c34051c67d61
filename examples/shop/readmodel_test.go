package shop_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/examples/shop"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// said collects a log.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// TestPartitionsDoNotWaitForEachOther: batches of several partitions have events of the same types, in every order.
func TestPartitionsDoNotWaitForEachOther(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	url := testenv.SharedPostgres(t).NewDB(t)
	cfg, err := pgx.ParseConfig(url)
	must(err)
	m := migrations.New(cfg, nil, migrations.Consumer)
	_, err = m.Up(t.Context(), migrations.Latest)
	must(err)
	must(m.Close())
	pool, err := pgxpool.New(t.Context(), url)
	must(err)
	t.Cleanup(pool.Close)
	_, err = pool.Exec(t.Context(), shop.Schema)
	must(err)
	nc := testenv.ConnectNATS(t, testenv.NewNATS(t, testenv.NATSOptions{Process: true}).URL())
	js := testenv.JetStream(t, nc)
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
	must(err)

	const orders, versions = 500, 8
	types := []string{"order.placed", "order.changed", "order.paid", "order.shipped"}
	for n := range orders * versions {
		order, version := n%orders, n/orders+1
		data, err := json.Marshal(shop.Change{After: shop.Order{
			ID: int64(order), PublicID: fmt.Sprintf("0b0e7a52-6a0f-4c69-9d0d-%012d", order), Total: 1, State: "placed", Version: version,
		}})
		must(err)
		eventType := types[n%len(types)]
		msg := &nats.Msg{Subject: "events." + eventType, Data: data, Header: nats.Header{
			"ce-id": {fmt.Sprint(n)}, "ce-source": {"test"}, "ce-type": {eventType}, "ce-specversion": {"1.0"}, "ce-tenantid": {"1"},
			"ce-aggregatetype": {"order"}, "ce-aggregateid": {fmt.Sprint(order)}, "Nats-Msg-Id": {fmt.Sprint("test/", n)},
		}}
		_, err = js.PublishMsgAsync(msg, jetstream.WithStallWait(time.Minute))
		must(err)
	}
	<-js.PublishAsyncComplete()

	log := &said{}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- shop.ReadModel(ctx, consume.Config{
			Pool: pool, NATS: nc, Start: "all", Partitions: 4, Logger: slog.New(slog.NewTextHandler(log, nil)),
		})
	}()
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		var handled, counted int
		must(pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM order_view_log), (SELECT coalesce(sum(events), 0) FROM projection_status)`).Scan(&handled, &counted))
		if handled == orders*versions && counted == handled {
			break
		}
		if time.Since(begun) > testenv.Patience {
			t.Fatalf("%d events are handled, and %d counted", handled, counted)
		}
	}
	stop()
	if err := <-ended; err != nil && ctx.Err() == nil {
		t.Error(err)
	}
	if strings.Contains(log.String(), "deadlock") {
		t.Errorf("the log says\n%s", log)
	}
}
