package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestLogger(t *testing.T) {
	var b bytes.Buffer
	log, err := newLogger(LogConfig{Level: "warn", Format: "auto"}, &b)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("loud")
	if got := b.String(); strings.Contains(got, "quiet") || !strings.HasPrefix(got, `{"level":"warn","time":"`) || !strings.Contains(got, `"msg":"loud"`) {
		t.Errorf("json: %s", got)
	}
	b.Reset()
	log, err = newLogger(LogConfig{Level: "info", Format: "console"}, &b)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("here")
	if got := b.String(); !strings.Contains(got, "\tINFO\there\n") {
		t.Errorf("console: %q", got)
	}
}
