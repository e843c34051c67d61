package relay

import (
	"context"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/outbox"
)

// TestLeftOutIsCounted: each row that the log does not name is in a count: of the next line of its kind, of a line of its own
// where no other comes, or of one at the end. A condition that lasts is not counted.
func TestLeftOutIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		p := newReporter(zap.New(core), newMetrics(prometheus.NewRegistry()))
		ctx, stop := context.WithCancel(t.Context())
		go p.watchSteps(ctx)
		row := outbox.Ref{Table: &outbox.Table{Schema: "public", Name: "outbox_messages"}, ID: "1"}
		die := func(n int) {
			for range n {
				p.deadLetter(row, "size: x")
			}
		}
		check := func(what string, lines int, left any) {
			t.Helper()
			all := logs.TakeAll()
			if len(all) != lines || lines > 0 && all[lines-1].ContextMap()["left_out"] != left {
				t.Errorf("%s: %v, want %d lines, the last with left_out %v", what, all, lines, left)
			}
		}
		die(1)
		check("the first", 1, nil)
		die(6)
		time.Sleep(10 * time.Second)
		die(1)
		check("the next line", 1, int64(6))
		die(3)
		p.refused(row, "a", &outbox.RowError{Class: outbox.RowSize})
		p.refused(row, "a", &outbox.RowError{Class: outbox.RowSize})
		p.refused(row, "b", &outbox.RowError{Class: outbox.RowSize})
		check("two kinds", 2, nil)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		got := map[any]any{}
		for _, e := range logs.TakeAll() {
			got[e.ContextMap()["kind"]] = e.ContextMap()["left_out"]
		}
		if want := (map[any]any{"dead_letter": int64(3), "refused/a/size": int64(1)}); !maps.Equal(got, want) {
			t.Errorf("where no line follows: %v, want %v", got, want)
		}
		time.Sleep(time.Minute)
		check("later", 0, nil)
		for range 100 {
			p.trouble("it lasts", context.Canceled)
		}
		check("what lasts", 1, nil)
		die(3)
		stop()
		synctest.Wait()
		check("at the end", 2, int64(2))
	})
}
