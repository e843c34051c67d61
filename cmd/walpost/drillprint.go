package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/drill"
	"github.com/walpost/walpost/verify"
)

func printDrill(w io.Writer, r *drill.Report, asJSON bool) error {
	if asJSON {
		return printJSON(w, r)
	}
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-11s %s\n", name, escape(oneLine(fmt.Sprintf(format, args...))))
	}
	row("drill", "%s: database %s, slot %s, stream %s", r.Drill, r.Database, r.Slot, r.Stream)
	for _, s := range r.Steps {
		row("", "%.1f s: %s", s.At.Sub(r.Began).Seconds(), s.Text)
	}
	if r.Injected == nil {
		row("", "nothing was broken")
	}
	if r.Outbox != "" {
		e := r.Events
		row("events", "%d committed into %s, %d stored", e.Committed, r.Outbox, e.Stored)
		if e.Pending > 0 {
			row("pending", "%d are not stored yet", e.Pending)
		}
		if e.InDoubt > 0 {
			row("in doubt", "%d have no message, and their commit was not answered", e.InDoubt)
		}
	}
	row("lost", "%d", r.Lost)
	row("duplicated", "%d", r.Duplicated)
	row("reordered", "%d", r.Reordered)
	for _, x := range r.Events.Examples {
		row("", "%s", x)
	}
	if r.Unknown > 0 {
		row("unknown", "%d messages of no row", r.Unknown)
	}
	if f := r.Failover; f != nil {
		row("failover", "PostgreSQL lost %d events that the primary had acknowledged; %d have messages",
			f.Lost, f.Phantoms)
	}
	if r.Failover != nil || r.Phantoms > 0 {
		row("phantoms", "%d messages of rows that the database does not have", r.Phantoms)
	}
	printDrillTimes(row, r)
	printDrillRest(row, r)
	return nil
}

func printDrillTimes(row func(name, format string, args ...any), r *drill.Report) {
	if r.Again != nil {
		row("delivers", "again %s after the fault began", *r.Again)
	}
	if r.CaughtUp != nil {
		row("caught up", "%s after the fault began", *r.CaughtUp)
	}
	if r.Outbox != "" {
		row("longest", "%s from commit to stored", r.Longest)
	}
}

func printDrillRest(row func(name, format string, args ...any), r *drill.Report) {
	if v := r.Verify; v != nil {
		text := fmt.Sprintf("%d messages, %d rows", v.Messages, v.Rows)
		for _, k := range verify.Kinds {
			text += fmt.Sprintf(", %d %s", v.Found[k].Count, k)
		}
		row("verify", "%s", text)
		for _, k := range verify.Kinds {
			for _, c := range v.Found[k].Examples {
				row("", "%s %s", k, caseText(c))
			}
		}
		for _, n := range v.Notes {
			row("note", "%s", n)
		}
	}
	if r.Verify == nil {
		row("incomplete", "the tables were not compared with the stream")
	}
	if r.Alarms != nil {
		var all []string
		for _, name := range slices.Sorted(maps.Keys(r.Alarms)) {
			all = append(all, fmt.Sprintf("%s %d", name, r.Alarms[name]))
		}
		if len(all) == 0 {
			all = []string{"none"}
		}
		row("alarms", "%s", strings.Join(all, ", "))
	}
	for _, n := range r.Notes {
		row("note", "%s", n)
	}
}

var alarmSeries = regexp.MustCompile(`(?m)^walpost_alarms_total\{alarm="([a-z0-9_]+)"\} ([0-9.e+]+)$`)

// readAlarms asks a relay of this machine, which listens as the configuration says.
func readAlarms(ctx context.Context, listen string) (map[string]int64, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, errors.New("http.listen is empty")
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	url := "http://" + net.JoinHostPort(host, port) + "/metrics"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	reply, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, 4<<20))
	if err != nil {
		return nil, err
	}
	if !strings.Contains(string(text), "walpost_build_info") {
		return nil, fmt.Errorf("%s is no relay's", url)
	}
	alarms := map[string]int64{}
	for _, m := range alarmSeries.FindAllStringSubmatch(string(text), -1) {
		n, _ := strconv.ParseFloat(m[2], 64)
		alarms[m[1]] = int64(n)
	}
	return alarms, nil
}
