package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestDocsAreServedUntilTheCommandEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	var stderr bytes.Buffer
	code := make(chan int, 1)
	go func() { code <- execute(ctx, []string{"docs"}, write, &stderr) }()
	line, err := bufio.NewReader(read).ReadString('\n')
	address := strings.TrimSpace(line)
	if err != nil || !strings.HasPrefix(address, "http://127.0.0.1:") {
		t.Fatalf("the first line is %q: %v", line, err)
	}
	response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(address + "ALARMS.html")
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(page), `id="events_lost"`) {
		t.Errorf("GET ALARMS.html: %s, %d bytes, %v", response.Status, len(page), err)
	}
	cancel()
	read.Close()
	if c := <-code; c != 0 || stderr.Len() > 0 {
		t.Errorf("ends with %d: %s", c, &stderr)
	}
}
