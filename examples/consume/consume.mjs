// npm install pg @nats-io/transport-node @nats-io/jetstream
// DATABASE_URL=postgres://... NATS_URL=nats://... node consume.mjs
//
// Handles each event of a stream once, in order: its effect, here a row of invoices, is committed with the
// consumer's position. One process works, others wait for its end. After an error the process ends; start it
// again. It has to reach PostgreSQL directly, not through a pooler.
import { jetstream } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";
import pg from "pg";

const [consumer, stream, partition] = ["billing-js", "EVENTS", 0];

const db = new pg.Client(process.env.DATABASE_URL);
await db.connect();
await db.query("SELECT walpost_define($1, $2, 1, 0)", [consumer, stream]);

let own; // the epoch, and the sequence up to which everything is settled
while (!own) {
  ({ rows: [own] } = await db.query("SELECT epoch, sequence FROM walpost_take($1, $2, 1)", [consumer, partition]));
  if (!own) await new Promise((resolve) => setTimeout(resolve, 1000));
}

async function handle(message) {
  const header = (name) => decodeURIComponent(message.headers?.get(name) ?? "");
  await db.query("BEGIN");
  const { rows: [{ settled }] } = await db.query(
    "SELECT walpost_claim($1, $2, $3) AS settled", [consumer, partition, own.epoch]);
  if (settled === null) throw new Error("another process has the partition");
  const { rows: [{ answer }] } = await db.query(
    "SELECT walpost_advance($1, $2, $3, $4, $5, $6, $7) AS answer",
    [consumer, partition, own.epoch, message.seq, header("ce-source"), header("ce-id"), message.time]);
  if (answer === "apply") {
    await db.query("INSERT INTO invoices (order_id, total) VALUES ($1, $2)",
      [header("ce-aggregateid"), message.json().total]);
  } else if (answer !== "skip") {
    throw new Error(`event ${message.seq} was not settled: ${answer}`); // the process ends, and nothing is committed
  }
  await db.query("COMMIT");
}

const nc = await connect({ servers: process.env.NATS_URL });
const events = await jetstream(nc).consumers.get(stream, {
  deliver_policy: "by_start_sequence", opt_start_seq: Number(own.sequence) + 1,
});
for await (const message of await events.consume()) await handle(message);
