package main

import (
	"embed"
	"strings"

	"github.com/walpost/walpost/bench"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// helpTexts are the manuals of the commands, each as a terminal shows it.
//
//go:embed help/*.txt
var helpTexts embed.FS

// helpNames are the names from the code that the manuals mention.
var helpNames = strings.NewReplacer(
	"{{bench.Database}}", bench.Database,
	"{{bench.Stream}}", bench.Stream,
	"{{table.DeadLetters}}", table.DeadLetters,
	"{{migrations.VersionTable}}", migrations.VersionTable,
	"{{outbox.NotifyChannel}}", outbox.NotifyChannel,
	"{{outbox.NotifyTrigger}}", outbox.NotifyTrigger,
)

// help is the manual of a command, such as "dlq list".
func help(command string) string {
	text, err := helpTexts.ReadFile("help/" + strings.ReplaceAll(command, " ", "_") + ".txt")
	if err != nil {
		panic(err)
	}
	return helpNames.Replace(strings.TrimSuffix(string(text), "\n"))
}
