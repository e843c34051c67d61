package main

import (
	"fmt"
	"html"
	"io"
	"strings"

	"github.com/walpost/walpost/bench"
)

func (k *kept) retained(w io.Writer, folder string) {
	if len(k.Report.Retained) == 0 {
		return
	}
	fmt.Fprintf(w, "![size of the outbox](%s/%s.svg)\n\n", folder, k.name)
	fmt.Fprintf(w, "| mark | events | events/s | after a tenth, MiB | after a half, MiB | at the end, MiB "+
		"| the journal then, MiB | vacuums | dead row versions |\n"+
		"| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n")
	for _, r := range k.Report.Retained {
		at := func(part int) bench.Size { return r.Sizes[len(r.Sizes)*part/10-1] }
		mib := func(bytes int64) float64 { return float64(bytes) / (1 << 20) }
		fmt.Fprintf(w, "| %s | %d | %.0f | %.0f | %.0f | %.0f | %.1f | %d | %d |\n", r.Mark, r.Rows,
			float64(r.Rows)/r.Took.Seconds(), mib(at(1).Outbox), mib(at(5).Outbox), mib(at(10).Outbox),
			mib(at(10).Journal), r.Vacuums, r.Dead)
	}
}

// plotSizes draws how large the outbox was, as a line for each mark.
func (k *kept) plotSizes() string {
	const left, width, top, height = 70, 680, 40, 300
	var most int64 = 1
	rows := 1
	for _, r := range k.Report.Retained {
		rows = max(rows, r.Rows)
		for _, s := range r.Sizes {
			most = max(most, s.Outbox)
		}
	}
	x := func(n int) float64 { return left + width*float64(n)/float64(rows) }
	y := func(bytes int64) float64 { return top + height*(1-float64(bytes)/float64(most)) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" `+
		`font-size="13">`+"\n"+`<rect width="100%%" height="100%%" fill="white"/>`+
		`<text x="8" y="20" font-weight="bold">%s</text>`+"\n",
		left+width+20, top+height+40, html.EscapeString(k.Title))
	for part := range 5 {
		bytes := most * int64(part) / 4
		fmt.Fprintf(&b, `<path d="M%d %.1fh%d" stroke="#ddd"/>`+
			`<text x="%d" y="%.1f" text-anchor="end">%d MiB</text>`+"\n",
			left, y(bytes), width, left-6, y(bytes)+4, bytes>>20)
		n := rows * part / 4
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.3g M</text>`+"\n",
			x(n), top+height+20, float64(n)/1e6)
	}
	for i, r := range k.Report.Retained {
		color := []string{"#1f77b4", "#d62728", "#2ca02c"}[i%3]
		var points []string
		for _, s := range r.Sizes {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(s.Rows), y(s.Outbox)))
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+
			`<text x="%d" y="%d" fill="%[2]s">mark %[5]s</text>`+"\n",
			strings.Join(points, " "), color, left+10, top+16*(i+1), html.EscapeString(r.Mark))
	}
	return b.String() + "</svg>\n"
}
