package decode_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walpost/walpost/internal/testenv"
)

// settings are those that the relay gives to all its sessions.
var settings = map[string]string{
	"datestyle": "ISO", "timezone": "UTC", "intervalstyle": "postgres",
	"extra_float_digits": "3", "bytea_output": "hex", "client_encoding": "UTF8",
}

// connect opens an SQL session.
func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range settings {
		config.RuntimeParams[name] = value
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// execFile runs a file statement by statement.
func execFile(t *testing.T, conn *pgx.Conn, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for statement := range strings.SplitSeq(string(b), ";\n") {
		exec(t, conn, statement)
	}
}

// receive streams what the slot holds up to now and returns the payloads of
// its XLogData, each in memory of its own.
func receive(t *testing.T, url, slot, publication string) [][]byte {
	t.Helper()
	exec(t, connect(t, url), "SELECT pg_logical_emit_message(false, 'decode_test', 'end')")
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range settings {
		config.RuntimeParams[name] = value
	}
	config.RuntimeParams["replication"] = "database"
	config.RuntimeParams["logical_decoding_work_mem"] = "64kB"
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	args := []string{"proto_version '1'", fmt.Sprintf("publication_names '%s'", publication), "messages 'true'"}
	if err := pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{PluginArgs: args}); err != nil {
		t.Fatal(err)
	}
	messages, err := receiveAll(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

func receiveAll(ctx context.Context, conn *pgconn.PgConn) (messages [][]byte, err error) {
	for {
		m, err := conn.ReceiveMessage(ctx)
		if err != nil {
			return nil, err
		}
		if e, ok := m.(*pgproto3.ErrorResponse); ok {
			return nil, errors.New(e.Message)
		}
		data, ok := m.(*pgproto3.CopyData)
		if !ok || data.Data[0] != pglogrepl.XLogDataByteID {
			continue
		}
		x, err := pglogrepl.ParseXLogData(data.Data[1:])
		if err != nil {
			return nil, err
		}
		if strings.Contains(string(x.WALData), "decode_test\x00") && x.WALData[0] == 'M' {
			return messages, nil
		}
		messages = append(messages, append([]byte(nil), x.WALData...))
	}
}
