// Package consume handles the events of a JetStream stream so that each takes effect once: what a handler
// changes in PostgreSQL and how far the consumer has come are committed in one transaction.
//
//	err := consume.Run(ctx, consume.Config{
//		Name: "billing", Pool: pool, NATS: nc, Stream: "EVENTS", Start: "all",
//	}, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
//		_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id) VALUES ($1)`, e.AggregateID)
//		return err
//	})
//
// Its tables are made by `walpost migrate up --only consumer`, in the database in which the handlers work.
//
// # Guarantees
//
//   - Each event that the stream holds takes effect once, whatever process, connection or server ends when.
//     This also holds where the stream has an event twice, or was restored from a backup or recreated, for
//     events of the last Config.Seen.
//   - The events of an aggregate are handled in the stream's order, one after the other.
//   - An event whose handler fails is kept whole in the table consumer_parked and tried again. Later events
//     of its aggregate wait behind it, others do not.
//
// # Non-guarantees
//
//   - [RunExternal] is for effects outside of the database: they happen at least once.
//   - Events of different aggregates may be handled in another order than the stream's, and at the same time.
//   - What the stream's limits delete before it was read is lost. It is noticed: see Config.SkipGaps.
//   - A handler that commits its transaction by SQL is noticed, but cannot be undone: its event is handled
//     again.
package consume
