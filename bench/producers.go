package bench

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
)

// Producing is how many transactions of one row sessions commit a second, as fast as they can.
type Producing struct {
	Mark     string `json:"mark"`
	Sessions int    `json:"sessions"`
	// Off is without a relay, before and after it was there, On beside one.
	Off float64 `json:"off"`
	On  float64 `json:"on"`
}

// producers measures what a relay costs those that write events.
func (b *bench) producers(ctx context.Context) error {
	for _, mark := range b.Marks {
		set := Setting{URL: b.url, Mark: mark, Batch: b.Batches[len(b.Batches)-1], Of: 1}
		b.Say("what a relay costs producers, mark %s", mark)
		p, err := b.producing(ctx, set)
		if err != nil {
			return fmt.Errorf("measure what a relay costs producers, mark %s: %w", mark, err)
		}
		b.report.Producing = append(b.report.Producing, *p)
	}
	return nil
}

func (b *bench) producing(ctx context.Context, set Setting) (*Producing, error) {
	if err := b.prepare(ctx, set, 0); err != nil {
		return nil, err
	}
	p := &Producing{Mark: set.Mark, Sessions: b.Producers}
	var rates [3]float64
	for i := range rates {
		var relay *process
		if i == 1 {
			if err := b.prepare(ctx, set, 0); err != nil { // what was written before is not delivered
				return nil, err
			}
			cmd, err := b.Command(set)
			if err != nil {
				return nil, err
			}
			if relay, err = start(cmd); err != nil {
				return nil, err
			}
			defer relay.kill()
			if _, err := b.saturate(ctx, set, time.Second); err != nil { // warm
				return nil, err
			}
		}
		n, err := b.saturate(ctx, set, b.For)
		if err != nil {
			return nil, err
		}
		rates[i] = float64(n) / b.For.Seconds()
		if relay == nil {
			continue
		}
		if err := relay.ended(); err != nil {
			return nil, fmt.Errorf("the relay: %w\n%s", err, relay.said())
		}
		if err := relay.stop(); err != nil {
			return nil, fmt.Errorf("stop the relay: %w\n%s", err, relay.said())
		}
	}
	p.Off, p.On = (rates[0]+rates[2])/2, rates[1]
	return p, nil
}

// saturate has all sessions commit rows for some time, and counts them.
func (b *bench) saturate(ctx context.Context, set Setting, d time.Duration) (rows int, err error) {
	sql, pad := set.insertSQL(), pad(b.Payload)
	counts := make([]int, b.Producers)
	end := time.Now().Add(d)
	err = b.sessions(ctx, b.Producers, func(w int, conn *pgx.Conn) error {
		for time.Now().Before(end) {
			if _, err := conn.Exec(ctx, sql, counts[w]%1000, -1, pad); err != nil {
				return err
			}
			counts[w]++
		}
		return nil
	})
	for _, n := range counts {
		rows += n
	}
	return rows, err
}

func (r *Report) printProducing(w io.Writer) error {
	fmt.Fprintf(w, "\nTransactions of one row a second of %d sessions, without a relay and beside one:\n\n",
		r.Producing[0].Sessions)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "without\tbeside\tof it\t ")
	for _, p := range r.Producing {
		fmt.Fprintf(t, "%.0f\t%.0f\t%s\t mark %s\n", p.Off, p.On, Known(2, p.On/p.Off), p.Mark)
	}
	return t.Flush()
}
