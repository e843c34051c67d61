package pg

// OwnSlot is the condition on a row of pg_replication_slots under which a relay of the connection's database
// can have made the slot. The relay drops no other one.
const OwnSlot = `(plugin = 'pgoutput' AND database = current_database()
	AND NOT temporary AND NOT two_phase) IS TRUE`
