// npm install pg; DATABASE_URL=postgres://... node node-pg.mjs
import pg from "pg";

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
// One client for the whole transaction: pool.query could take another connection for each statement.
const client = await pool.connect();
try {
  await client.query("BEGIN");
  await client.query("UPDATE orders SET state = 'placed' WHERE id = $1", [42]);
  const { rows } = await client.query(
    `INSERT INTO outbox_events (tenant_id, aggregate_type, aggregate_id, event_type, payload)
     VALUES ($1, $2, $3, $4, $5) RETURNING id`,
    [7, "order", "42", "order.placed", JSON.stringify({ total: 1250, currency: "EUR" })],
  );
  await client.query("COMMIT");
  console.log(rows[0].id); // a string: a bigint does not fit a number
} catch (err) {
  await client.query("ROLLBACK");
  throw err;
} finally {
  client.release();
  await pool.end();
}
