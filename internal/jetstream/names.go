package jetstream

// PositionHeader carries an outbox.Position.
const PositionHeader = "Walpost-Position"

// ViaHeader says who published a message where it was not the WAL's stream.
const ViaHeader = "Walpost-Via"

// ViaPoll is its value in messages that repeat the publisher's position: of rows that were
// read from their table, and of rows that the WAL brought and that had to wait until the
// publisher was past them. CommitHeader tells them apart.
const ViaPoll = "poll"

// CommitHeader says where the WAL has the row of a message that repeats the publisher's
// position: "<commit LSN>/<n>" of the same WAL, as in PositionHeader. A message of a row
// that was read from its table has none: the table does not know.
const CommitHeader = "Walpost-Commit"

// ViaReplay is the value of ViaHeader in messages of rows that were published again on purpose. They
// repeat the publisher's position, too.
const ViaReplay = "replay"

// ReplayOfHeader has the ce-id of the message that was published before.
const ReplayOfHeader = "Walpost-Replay-Of"
