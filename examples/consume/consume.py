# apt-get install python3-psycopg, or pip install psycopg
# DATABASE_URL=postgres://... WALPOST_NATS_URL=nats://... python3 consume.py
#
# Handles each event of a stream once, in order: its effect, here a row of invoices, is committed with the
# consumer's position. One process works, others wait for its end. After an error the process ends; start it
# again. It has to reach PostgreSQL directly, not through a pooler. `walpost tail` reads the stream for it.
import json
import os
import subprocess
import time

import psycopg

CONSUMER, STREAM, PARTITION = "billing-py", "EVENTS", 0

# autocommit: transactions are those of conn.transaction(). Without client_encoding, psycopg returns bytes for texts of a
# database in SQL_ASCII.
with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, client_encoding="UTF8") as conn:
    conn.execute("SELECT walpost_define(%s, %s, 1, 0)", (CONSUMER, STREAM))
    take = "SELECT epoch, sequence FROM walpost_take(%s, %s, 1)"
    while not (own := conn.execute(take, (CONSUMER, PARTITION)).fetchone()):
        time.sleep(1)
    epoch, sequence = own

    def handle(event):
        with conn.transaction():
            claim = "SELECT walpost_claim(%s, %s, %s)"
            if conn.execute(claim, (CONSUMER, PARTITION, epoch)).fetchone()[0] is None:
                raise RuntimeError("another process has the partition")
            (answer,) = conn.execute(
                "SELECT walpost_advance(%s, %s, %s, %s, %s, %s, %s)",
                (CONSUMER, PARTITION, epoch, event["sequence"], event["source"], event["id"], event["stored"]),
            ).fetchone()
            if answer == "apply":
                conn.execute(
                    "INSERT INTO invoices (order_id, total) VALUES (%s, %s)",
                    (event["aggregate_id"], event["payload"]["total"]),
                )
            elif answer != "skip":  # an exception rolls back
                raise RuntimeError(f"event {event['sequence']} was not settled: {answer!r}")

    tail = ["walpost", "tail", "--json", "--from", str(sequence + 1)]
    with subprocess.Popen(tail, env={**os.environ, "WALPOST_STREAM": STREAM}, stdout=subprocess.PIPE) as events:
        for line in events.stdout:
            handle(json.loads(line))
