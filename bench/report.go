package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"
)

// Report is what was measured.
type Report struct {
	PostgreSQL string `json:"postgresql"`
	NATS       string `json:"nats"`
	Replicas   int    `json:"replicas"`
	Rows       int    `json:"rows"`
	PerTx      int    `json:"rows_per_transaction"`
	Payload    int    `json:"payload_bytes"`
	// Drains are all runs of the source, of each drain, and of the sinks.
	Drains    []*Drain    `json:"drains"`
	Costs     []Cost      `json:"costs,omitempty"`
	Latencies []Latency   `json:"latencies,omitempty"`
	Producing []Producing `json:"producing,omitempty"`
	Retained  []*Retained `json:"retained,omitempty"`
	Notes     []string    `json:"notes,omitempty"`
}

// Drain is one way to read or write the rows, and its runs.
type Drain struct {
	Name string        `json:"name"`
	Runs []Measurement `json:"runs"`
}

// Measurement is one run. Times are in nanoseconds.
type Measurement struct {
	Rows int `json:"rows"`
	// Took is the time that the rate is computed from: a relay's begins with its first message and ends with
	// its last one, or with its last mark where it marks rows.
	Took time.Duration `json:"took"`
	// Whole begins with the start of the process.
	Whole time.Duration `json:"whole,omitempty"`
	// Relay, Postgres and Broker are the CPU time of the whole run; 0 where it is not known.
	Relay    time.Duration `json:"relay_cpu"`
	Postgres time.Duration `json:"postgres_cpu"`
	Broker   time.Duration `json:"nats_cpu"`
	RSS      int64         `json:"relay_rss"` // the greatest, in bytes; 0 is not known
	// FirstTenth and LastTenth are how long the first and the last tenth of the rows took; 0 is not known.
	FirstTenth time.Duration `json:"first_tenth,omitempty"`
	LastTenth  time.Duration `json:"last_tenth,omitempty"`
}

// Latency is how long rows took at a rate of commits.
type Latency struct {
	Mark     string    `json:"mark"`
	Rate     int       `json:"rate"`
	Reached  float64   `json:"reached"` // commits a second
	PubAck   Quantiles `json:"pub_ack"`
	Consumer Quantiles `json:"consumer"`
}

// Quantiles of times, in nanoseconds.
type Quantiles struct {
	Count int           `json:"count"`
	P50   time.Duration `json:"p50"`
	P99   time.Duration `json:"p99"`
	P999  time.Duration `json:"p999"`
	Max   time.Duration `json:"max"`
}

func (r *Report) add(name string, m Measurement) {
	for _, d := range r.Drains {
		if d.Name == name {
			d.Runs = append(d.Runs, m)
			return
		}
	}
	r.Drains = append(r.Drains, &Drain{name, []Measurement{m}})
}

func (r *Report) note(s string) {
	if !slices.Contains(r.Notes, s) {
		r.Notes = append(r.Notes, s)
	}
}

// Rate is the median of rows a second.
func (d *Drain) Rate() float64 {
	return median(each(d.Runs, func(m Measurement) float64 { return float64(m.Rows) / m.Took.Seconds() }))
}

// CPU is the median of CPU seconds for a million rows: the client's, PostgreSQL's and
// the NATS server's; 0 where it is not known.
func (d *Drain) CPU() (client, postgres, broker float64) {
	return d.perMillion(func(m Measurement) time.Duration { return m.Relay }),
		d.perMillion(func(m Measurement) time.Duration { return m.Postgres }),
		d.perMillion(func(m Measurement) time.Duration { return m.Broker })
}

// Steadiness is the median of the last tenth's rate divided by the first one's; 0 where it is not known.
func (d *Drain) Steadiness() float64 {
	return median(each(d.Runs, func(m Measurement) float64 {
		if m.LastTenth <= 0 {
			return 0
		}
		return m.FirstTenth.Seconds() / m.LastTenth.Seconds()
	}))
}

// Whole is the median of the time from the start of the process.
func (d *Drain) Whole() time.Duration {
	return median(each(d.Runs, func(m Measurement) time.Duration { return m.Whole }))
}

// Source is the rate of the source, 0 where it was not measured.
func (r *Report) Source() float64 {
	for _, d := range r.Drains {
		if d.Name == nameSource {
			return d.Rate()
		}
	}
	return 0
}

// Known is a figure with so many decimals, or "-" where it is not known: 0, infinite or not a number.
func Known(decimals int, x float64) string {
	if x == 0 || math.IsInf(x, 0) || math.IsNaN(x) {
		return "-"
	}
	return strconv.FormatFloat(x, 'f', decimals, 64)
}

// RSS is the median of the client's greatest resident memory, in bytes.
func (d *Drain) RSS() int64 {
	return median(each(d.Runs, func(m Measurement) int64 { return m.RSS }))
}

// perMillion is the median of CPU seconds for a million rows.
func (d *Drain) perMillion(of func(Measurement) time.Duration) float64 {
	return median(each(d.Runs, func(m Measurement) float64 {
		return of(m).Seconds() * 1e6 / float64(m.Rows)
	}))
}

func each[A, B any](all []A, do func(A) B) []B {
	out := make([]B, len(all))
	for i, a := range all {
		out[i] = do(a)
	}
	return out
}

// HasFigures reports whether anything was measured.
func (r *Report) HasFigures() bool {
	return len(r.Drains)+len(r.Costs)+len(r.Latencies)+len(r.Producing)+len(r.Retained) > 0
}

// Print writes the report as tables.
func (r *Report) Print(w io.Writer) error {
	fmt.Fprintf(w, "PostgreSQL %s, NATS %s, R%d: "+
		"%d rows of %d bytes, %d in each transaction; medians of %d runs\n\n",
		r.PostgreSQL, r.NATS, r.Replicas, r.Rows, r.Payload, r.PerTx, r.runs())
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	if len(r.Drains) > 0 {
		fmt.Fprintln(t, "rows/s\tof source\tfrom start s\tlast/first tenth\t"+
			"client CPU s/M\tPostgreSQL s/M\tNATS s/M\tRSS MiB\t ")
	}
	for _, d := range r.Drains {
		client, postgres, broker := d.CPU()
		fmt.Fprintf(t, "%.0f\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t %s\n",
			d.Rate(), Known(2, d.Rate()/r.Source()), Known(2, d.Whole().Seconds()), Known(2, d.Steadiness()),
			Known(2, client), Known(2, postgres), Known(2, broker),
			Known(0, float64(d.RSS())/(1<<20)), d.Name)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(r.Costs) > 0 {
		if err := r.printCosts(w); err != nil {
			return err
		}
	}
	if len(r.Latencies) > 0 {
		fmt.Fprintln(w, "\nTo PubAck from the commit's own timestamp, "+
			"to a consumer from the answer to COMMIT, in milliseconds:")
		fmt.Fprintln(t, "\ncommits/s\treached\tto PubAck p50\tp99\tp99.9\tmax\t"+
			"to a consumer p50\tp99\tp99.9\tmax\t ")
		for _, l := range r.Latencies {
			fmt.Fprintf(t, "%d\t%.0f\t%s%s mark %s\n",
				l.Rate, l.Reached, l.PubAck.cells(), l.Consumer.cells(), l.Mark)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if len(r.Producing) > 0 {
		if err := r.printProducing(w); err != nil {
			return err
		}
	}
	if err := r.printRetained(w); err != nil {
		return err
	}
	for _, n := range r.Notes {
		fmt.Fprintln(w, "note:", n)
	}
	return nil
}

func (q Quantiles) cells() (s string) {
	for _, d := range []time.Duration{q.P50, q.P99, q.P999, q.Max} {
		s += fmt.Sprintf("%.2f\t", float64(d.Microseconds())/1000)
	}
	return s
}

func (r *Report) runs() (n int) {
	for _, d := range r.Drains {
		n = max(n, len(d.Runs))
	}
	return n
}
