package alarm

// The table. An entry and a file of its name in runbook are a new alarm.
var (
	AnotherServer = entry("another_server", Critical,
		"a connection reached another PostgreSQL server than the one that holds the lock; the term ends")
	ComparisonGivenUp = entry("comparison_given_up", Warning,
		"a start could not check whether the stream has lost rows")
	EventsLost = entry("events_lost", Critical,
		"JetStream lost stored messages; they are delivered again")
	FalseDuplicate = entry("false_duplicate", Warning,
		"JetStream reported a duplicate that the stream does not hold; the row is parked")
	ForeignMessage = entry("foreign_message", Warning,
		"another writer publishes into an exclusive stream")
	ForgedMessage = entry("forged_message", Warning,
		"another writer published under a row's message id; the row is delivered all the same")
	InsertedMarked = entry("inserted_marked", Warning,
		"a producer inserts rows as processed; they are not delivered")
	MissedRows = entry("missed_rows", Warning,
		"the WAL did not bring rows; the table delivered them, late")
	NoConsumer = entry("no_consumer", Warning,
		"the recovery scan gets no consumer, and is slow",
		"messages are read back through a consumer again")
	NoProgress = entry("no_progress", Warning,
		"starts fail again and again at one step; nothing is delivered")
	NothingToCompare = entry("nothing_to_compare", Warning,
		"rows are marked, and no message in the stream belongs to them")
	OutboxShared = entry("outbox_shared", Warning,
		"another relay would deliver some of the same rows; only the first one delivers",
		"no other relay would deliver the same rows any more")
	Phantoms = entry("phantoms", Warning,
		"the stream holds events that a failover undid")
	PublicationSkipped = entry("publication_skipped", Warning,
		"PostgreSQL 18 decoded without the publication; the tables deliver what it left out")
	Rival = entry("rival", Critical,
		"another relay of the same source writes to the stream; this one stands by")
	RowLocked = entry("row_locked", Warning,
		"a row or a table has been locked for more than five seconds",
		"no lock keeps the rows waiting any more")
	RowUnsettled = entry("row_unsettled", Warning,
		"the database refuses a row's mark or record; the slot waits for it",
		"the rows whose mark or record was refused are settled")
	RowsChanged = entry("rows_changed", Warning,
		"marked rows differ from their messages")
	RowsDeleted = entry("rows_deleted", Warning,
		"a producer deletes its rows before they are marked; without the slot they would be lost")
	ServerRolledBack = entry("server_rolled_back", Critical,
		"PostgreSQL was put back to an older state")
	SlotForeign = entry("slot_foreign", Warning,
		"another program has a slot of the relay's name; the relay has none")
	SlotGivenUp = entry("slot_given_up", Warning,
		"the slot is useless and is recreated; the tables deliver meanwhile")
	SlotInUse = entry("slot_in_use", Critical,
		"another program streams the slot; nothing is delivered")
	SlotLeft = entry("slot_left", Critical,
		"the relay polls and cannot drop its slot, which keeps WAL",
		"the slot is dropped")
	SlotNotMade = entry("slot_not_made", Warning,
		"the slot cannot be created; the tables are polled")
	SlotShared = entry("slot_shared", Warning,
		"a relay with other outboxes or another stream holds the lock; this one stands by",
		"no relay that serves something else holds the lock any more")
	StandbySlot = entry("standby_slot", Critical,
		"PostgreSQL sends no WAL until a standby has it",
		"PostgreSQL sends WAL again")
	StreamGone = entry("stream_gone", Critical,
		"the stream does not exist any more; the relay does not recreate it")
	StreamReplaced = entry("stream_replaced", Critical,
		"the stream was deleted and recreated")
	StreamRolledBack = entry("stream_rolled_back", Critical,
		"the stream ends before an acknowledged message")
	StreamUnfit = entry("stream_unfit", Warning,
		"the stream was edited into one that a start refuses; nothing is sent")
	Synchronous = entry("synchronous", Critical,
		"synchronous_standby_names includes the relay; commits wait for it")
	TableUnfit = entry("table_unfit", Critical,
		"a table does not fit; an outbox whose table it is waits, the others are delivered",
		"the table is in order again")
	Undecodable = entry("undecodable", Warning,
		"the WAL holds a row that the layout does not fit; the slot is recreated behind it")
	Unpublished = entry("unpublished", Critical,
		"the publication does not bring every row; the tables deliver the others, late",
		"the publication is in order again")
	Unsendable = entry("unsendable", Warning,
		"the walsender fails at a row; the slot is recreated behind it")
	WalsenderSilent = entry("walsender_silent", Critical,
		"the walsender hangs; nothing is delivered",
		"the walsender works again")
)
