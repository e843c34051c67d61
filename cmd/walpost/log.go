package main

import (
	"fmt"
	"io"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger writes to w, one line an event. There is no sampling: the relay limits what it repeats.
func newLogger(cfg LogConfig, w io.Writer) (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(cfg.Level)
	if err != nil {
		return nil, fmt.Errorf("log.level: %w", err)
	}
	format := cfg.Format
	if format == "auto" {
		format = "json"
		if isTerminal(w) {
			format = "console"
		}
	}
	encoding := zapcore.EncoderConfig{
		TimeKey: "time", LevelKey: "level", NameKey: "logger", MessageKey: "msg",
		EncodeTime:     zapcore.TimeEncoderOfLayout("2006-01-02T15:04:05.000Z07:00"),
		EncodeLevel:    zapcore.LowercaseLevelEncoder,
		EncodeDuration: zapcore.StringDurationEncoder,
		EncodeName:     zapcore.FullNameEncoder,
	}
	encoder := zapcore.NewJSONEncoder(encoding)
	if format == "console" {
		encoding.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		encoding.EncodeLevel = zapcore.CapitalLevelEncoder
		if colours(w) {
			w = levelPainter{trusted(w)}
		}
		encoder = zapcore.NewConsoleEncoder(encoding)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(w)), level)), nil
}

// levelPainter gives the levels of a console log their colours. Each Write is one entry: the time, a tab, the
// level, a tab and the rest, which others may have written in part.
type levelPainter struct{ w io.Writer }

func (l levelPainter) Write(entry []byte) (int, error) {
	at, rest, _ := strings.Cut(string(entry), "\t")
	level, rest, _ := strings.Cut(rest, "\t")
	_, err := fmt.Fprintf(l.w, "%s\t%s%s%s\t%s", at, logColours[level], level, reset, escapeLines(rest))
	return len(entry), err
}

var logColours = map[string]string{"DEBUG": blue, "INFO": blue, "WARN": yellow, "ERROR": red}

func isTerminal(w io.Writer) bool {
	_, ok := terminalWidth(w)
	return ok
}
