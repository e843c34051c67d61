package main

import (
	"slices"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// logger is the relay's: warnings and errors, above the block.
func (s *screen) logger() *zap.Logger {
	encoder := zapcore.NewConsoleEncoder(zapcore.EncoderConfig{
		LevelKey: "level", NameKey: "logger", MessageKey: "msg",
		EncodeLevel: zapcore.LowercaseLevelEncoder, EncodeName: zapcore.FullNameEncoder,
		EncodeDuration: zapcore.StringDurationEncoder, ConsoleSeparator: " ",
	})
	core := zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(s.stderr())), zap.WarnLevel)
	return zap.New(said{core}).Named("relay")
}

// said leaves out what the summary says of every run: that the stream has one
// replica.
type said struct{ zapcore.Core }

func (c said) With(fields []zapcore.Field) zapcore.Core { return said{c.Core.With(fields)} }

func (c said) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if !c.Enabled(e.Level) {
		return checked
	}
	return checked.AddCore(e, c)
}

func (c said) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if slices.ContainsFunc(fields, func(f zapcore.Field) bool {
		return f.Key == "code" && f.String == "stream-one-replica"
	}) {
		return nil
	}
	return c.Core.Write(e, fields)
}
