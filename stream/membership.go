package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// membership says how a publication has a table, in words that change with every change of it: a
// row of a catalog that is written again has another xmin.
type membership struct {
	publication string
	relation    string   // with its place in a partition tree
	member      string   // by what the publication has the table; "" where by nothing of the table's own
	members     []string // all such, of every table
}

// readMembership reads one. It takes no lock on the table.
func readMembership(
	ctx context.Context, conn *pgx.Conn, publication string, t *outbox.Table,
) (m membership, err error) {
	schemas := "SELECT NULL::oid AS pnnspid, NULL::text AS member WHERE false"
	if serverVersion(conn.PgConn()) >= 15 {
		schemas = `SELECT s.pnnspid, concat('schema ', s.oid, ' ', s.xmin) AS member
			FROM pg_publication_namespace s JOIN p ON s.pnpubid = p.oid`
	}
	err = conn.QueryRow(ctx, `WITH
		p AS (SELECT oid, xmin, puballtables FROM pg_publication WHERE pubname = $1),
		c AS (SELECT c.oid, c.relnamespace, concat(c.oid, ' ', c.xmin) AS version
			FROM pg_class c WHERE c.oid = to_regclass($2)),
		s AS (`+schemas+`),
		r AS (SELECT r.prrelid, concat('table ', r.prrelid, ' ', r.oid, ' ', r.xmin) AS member
			FROM pg_publication_rel r JOIN p ON r.prpubid = p.oid),
		a AS (SELECT 'all' AS member FROM p WHERE puballtables)
		SELECT coalesce((SELECT concat(oid, ' ', xmin) FROM p), ''),
			coalesce((SELECT concat(version, ' ',
				ARRAY(SELECT relid::oid FROM pg_partition_ancestors(oid) relid)) FROM c), ''),
			coalesce((SELECT member FROM a), (SELECT member FROM r JOIN c ON r.prrelid = c.oid),
				(SELECT member FROM s JOIN c ON s.pnnspid = c.relnamespace), ''),
			ARRAY(SELECT member FROM a UNION ALL SELECT member FROM r
				UNION ALL SELECT member FROM s ORDER BY 1)`,
		publication, t.SQL()).
		Scan(&m.publication, &m.relation, &m.member, &m.members)
	if err != nil {
		return m, fmt.Errorf("read how publication %q has %s: %w", publication, t, err)
	}
	return m, nil
}

func (m membership) equal(other membership) bool {
	return m.publication == other.publication && m.relation == other.relation && m.member == other.member &&
		slices.Equal(m.members, other.members)
}

// Published says by what a publication has tables: catalog rows, which are others where a table was taken out
// and added again, or the publication was altered. It is "" where the publication does not bring inserts into
// the table.
type Published struct {
	Publication string
	Tables      []*outbox.Table
	As          map[*outbox.Table]string // set by Take
}

// Take looks. It takes no lock on a table.
func (p *Published) Take(ctx context.Context, conn *pgx.Conn) (err error) {
	p.As = map[*outbox.Table]string{}
	for _, t := range p.Tables {
		if p.As[t], err = publishedAs(ctx, conn, p.Publication, t); err != nil {
			return err
		}
	}
	return nil
}

func publishedAs(ctx context.Context, conn *pgx.Conn, publication string, t *outbox.Table) (string, error) {
	schemas := "SELECT NULL::oid AS oid, NULL::oid AS pnnspid, NULL::oid AS pnpubid WHERE false"
	if serverVersion(conn.PgConn()) >= 15 {
		schemas = "SELECT oid, pnnspid, pnpubid FROM pg_publication_namespace"
	}
	var as string
	err := conn.QueryRow(ctx, `WITH
		p AS (SELECT oid, xmin, puballtables FROM pg_publication WHERE pubname = $1 AND pubinsert),
		c AS (SELECT to_regclass($2)::oid AS id
			UNION SELECT relid FROM pg_partition_ancestors(to_regclass($2)) relid),
		s AS (`+schemas+`),
		m AS (SELECT 'all' AS member FROM p WHERE puballtables
			UNION ALL SELECT format('table %s', r.oid)
			FROM pg_publication_rel r JOIN p ON r.prpubid = p.oid WHERE r.prrelid IN (SELECT id FROM c)
			UNION ALL SELECT format('schema %s', s.oid)
			FROM s JOIN p ON s.pnpubid = p.oid
			WHERE s.pnnspid IN (SELECT relnamespace FROM pg_class JOIN c ON oid = id))
		SELECT coalesce(format('publication %s %s: ', (SELECT oid FROM p), (SELECT xmin FROM p))
			|| string_agg(member, ', ' ORDER BY member), '') FROM m`,
		publication, t.SQL()).Scan(&as)
	if err != nil {
		return "", fmt.Errorf("read how publication %q has %s: %w", publication, t, err)
	}
	return as, nil
}

// PublicationLook says whether a publication brings every row of the tables.
type PublicationLook struct {
	Publication string
	Tables      []*outbox.Table
	// Before is the look before this one, nil for the first.
	Before *PublicationLook
	// Problem is what is wrong with the publication, nil where nothing is.
	Problem error

	members map[*outbox.Table]membership
}

// Take looks. Where nothing has changed since the last look, it takes no lock on a table.
func (l *PublicationLook) Take(ctx context.Context, conn *pgx.Conn) (err error) {
	l.members = map[*outbox.Table]membership{}
	same := l.Before != nil
	for _, t := range l.Tables {
		if l.members[t], err = readMembership(ctx, conn, l.Publication, t); err != nil {
			return err
		}
		same = same && l.members[t].equal(l.Before.members[t])
	}
	if same {
		l.Problem = l.Before.Problem
	} else if l.Problem, err = publicationProblem(ctx, conn, l.Publication, l.Tables); err != nil {
		return err
	}
	l.Before = nil
	return nil
}

// publicationProblem tells what is wrong from what keeps that from being found out.
func publicationProblem(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (problem, err error) {
	err = CheckPublication(ctx, conn, name, tables)
	if hint.CodeOf(err) != "" || errors.Is(err, ErrNoPublication) {
		return err, nil
	}
	return nil, err
}
