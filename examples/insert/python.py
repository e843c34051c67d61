# apt-get install python3-psycopg, or pip install psycopg; DATABASE_URL=postgres://... python3 python.py
import os

import psycopg
from psycopg.types.json import Jsonb

with psycopg.connect(os.environ["DATABASE_URL"]) as conn:
    with conn.transaction():
        conn.execute("UPDATE orders SET state = 'placed' WHERE id = %s", (42,))
        row = conn.execute(
            """INSERT INTO outbox_events (tenant_id, aggregate_type, aggregate_id, event_type, payload)
               VALUES (%s, %s, %s, %s, %s) RETURNING id""",
            (7, "order", "42", "order.placed", Jsonb({"total": 1250, "currency": "EUR"})),
        ).fetchone()
    print(row[0])
