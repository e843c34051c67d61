package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/walpost/walpost/bench"
)

// kept is one result that is kept: the file says under which circumstances it was
// measured, and walpost bench the rest.
type kept struct {
	name   string
	Title  string        `json:"title"`
	Report *bench.Report `json:"report"`
}

// summarize prints the tables of a folder's results, and draws a plot of each beside it.
func summarize(w io.Writer, folder string) error {
	for _, c := range cases {
		text, err := os.ReadFile(filepath.Join(folder, c.name+".json"))
		if errors.Is(err, fs.ErrNotExist) { // no result of this case is kept
			continue
		}
		if err != nil {
			return err
		}
		k := kept{name: c.name}
		if err := json.Unmarshal(text, &k); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		k.table(w, filepath.Base(folder))
		plot := ""
		switch {
		case len(k.Report.Drains) > 0:
			plot = k.plot()
		case len(k.Report.Retained) > 0:
			plot = k.plotSizes()
		default:
			continue
		}
		if err := os.WriteFile(filepath.Join(folder, k.name+".svg"), []byte(plot), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (k *kept) table(w io.Writer, folder string) {
	r := k.Report
	rows := fmt.Sprintf("rows of %d bytes", r.Payload)
	switch {
	case len(r.Drains) > 0:
		rows = fmt.Sprintf("%d %s, %d in each transaction", r.Rows, rows, r.PerTx)
	case len(r.Costs) > 0:
		rows = fmt.Sprintf("%d %s, %d in each transaction", r.Costs[0].Rows, rows, r.PerTx)
	}
	fmt.Fprintf(w, "\n## %s\n\nPostgreSQL %s, NATS %s, R%d; %s; raw output in [%s.json](%s/%s.json).\n\n",
		k.Title, short(r.PostgreSQL), r.NATS, r.Replicas, rows, k.name, folder, k.name)
	if len(r.Drains) > 0 {
		fmt.Fprintf(w, "![rows a second](%s/%s.svg)\n\n", folder, k.name)
		fmt.Fprintln(w, "| | rows/s | of the source | from the start, s | last/first tenth "+
			"| client CPU, s/M | PostgreSQL CPU, s/M | NATS CPU, s/M | sum "+
			"| of what the sum allows | memory, MiB |")
		fmt.Fprintln(w, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	}
	for _, d := range r.Drains {
		client, postgres, broker := d.CPU()
		sum, known := client+postgres+broker, bench.Known
		if r.Replicas > 1 { // it is known of one server only
			sum = 0
		}
		fmt.Fprintf(w, "| %s | %.0f | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n",
			d.Name, d.Rate(), known(2, d.Rate()/r.Source()),
			known(2, d.Whole().Seconds()), known(2, d.Steadiness()),
			known(2, client), known(2, postgres), known(2, broker), known(2, sum),
			known(2, d.Rate()*sum/1e6/cores), known(0, float64(d.RSS())/(1<<20)))
	}
	k.costs(w)
	k.producing(w)
	k.retained(w, folder)
	if len(r.Latencies) == 0 {
		return
	}
	fmt.Fprint(w, "\nFrom the commit, in milliseconds:\n\n| mark | commits/s | reached "+
		"| to PubAck p50 | p99 | p99.9 | max | to a consumer p50 | p99 | p99.9 | max |\n")
	fmt.Fprintln(w, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, l := range r.Latencies {
		fmt.Fprintf(w, "| %s | %d | %.0f |", l.Mark, l.Rate, l.Reached)
		for _, q := range []bench.Quantiles{l.PubAck, l.Consumer} {
			for _, d := range []time.Duration{q.P50, q.P99, q.P999, q.Max} {
				fmt.Fprintf(w, " %.2f |", float64(d.Microseconds())/1000)
			}
		}
		fmt.Fprintln(w)
	}
}

// costs prints what events have cost, in units of an event.
func (k *kept) costs(w io.Writer) {
	if len(k.Report.Costs) == 0 {
		return
	}
	fmt.Fprintln(w, "| | WAL, bytes | of its INSERT | of the relay | PostgreSQL CPU, us | dead rows "+
		"| size at the end, MiB |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, c := range k.Report.Costs {
		per := func(n int64) float64 { return float64(n) / float64(c.Rows) }
		fmt.Fprintf(w, "| %s | %.0f | %.0f | %.1f | %s | %.2f | %.1f |\n", c.Name, per(c.WAL), per(c.Insert),
			per(c.Relay), bench.Known(1, per(c.CPU.Microseconds())), per(c.Dead), float64(c.Size)/(1<<20))
	}
}

// producing prints what a relay has cost producers.
func (k *kept) producing(w io.Writer) {
	if len(k.Report.Producing) == 0 {
		return
	}
	fmt.Fprintf(w, "Transactions of one row a second of %d sessions:\n\n"+
		"| mark | without a relay | beside one | of it |\n| --- | ---: | ---: | ---: |\n",
		k.Report.Producing[0].Sessions)
	for _, p := range k.Report.Producing {
		fmt.Fprintf(w, "| %s | %.0f | %.0f | %.2f |\n", p.Mark, p.Off, p.On, p.On/p.Off)
	}
}

// cores is what the results were measured on.
const cores = 2

func short(version string) string { return strings.Fields(version)[0] }

// plot draws the rates as bars.
func (k *kept) plot() string {
	const line, left, width = 26, 330, 420
	most := 0.0
	for _, d := range k.Report.Drains {
		most = max(most, d.Rate())
	}
	var b strings.Builder
	height := line*len(k.Report.Drains) + 40
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" `+
		`font-family="sans-serif" font-size="13">`+"\n", left+width+90, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+
		`<text x="8" y="20" font-weight="bold">%s: rows a second</text>`+"\n", html.EscapeString(k.Title))
	for i, d := range k.Report.Drains {
		y := 34 + i*line
		colour := "#2f6f9f"
		if !strings.HasPrefix(d.Name, "walpost") {
			colour = "#b0b7bd"
		}
		w := d.Rate() / most * width
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+
			`<rect x="%d" y="%d" width="%.0f" height="18" fill="%s"/><text x="%.0f" y="%d">%.0f</text>`+"\n",
			left-8, y+14, html.EscapeString(d.Name), left, y, w, colour, left+w+6, y+14, d.Rate())
	}
	b.WriteString("</svg>\n")
	return b.String()
}
