package outbox

// A table whose inserts are announced has a trigger NotifyTrigger, which calls the
// function of that name, which does NOTIFY NotifyChannel without a payload, once
// for each statement. `walpost migrate up --notify-trigger` installs it.
const (
	NotifyTrigger = "walpost_notify"
	NotifyChannel = "walpost_outbox"
)
