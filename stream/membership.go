package stream

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	as          string   // see Membership.As
	members     []string // by what the publication has any table
}

// readMembership reads one. It takes no lock on the table.
func readMembership(
	ctx context.Context, conn *pgx.Conn, publication string, t *outbox.Table,
) (m membership, err error) {
	schemas := ""
	if serverVersion(conn.PgConn()) >= 15 {
		schemas = `UNION ALL SELECT concat('schema ', s.oid), concat('schema ', s.oid, ' ', s.xmin),
				s.pnnspid IN (SELECT relnamespace FROM pg_class JOIN t USING (oid))
			FROM pg_publication_namespace s JOIN p ON s.pnpubid = p.oid`
	}
	err = conn.QueryRow(ctx, `WITH
		p AS (SELECT oid, concat(oid, ' ', xmin) AS version, puballtables, pubinsert
			FROM pg_publication WHERE pubname = $1),
		c AS (SELECT oid, concat(oid, ' ', xmin) AS version FROM pg_class WHERE oid = to_regclass($2)),
		t AS (SELECT oid FROM c UNION SELECT relid FROM c, pg_partition_ancestors(c.oid) relid),
		m (name, version, has) AS (SELECT 'all', 'all', true FROM p WHERE puballtables
			UNION ALL SELECT concat('table ', r.oid), concat('table ', r.prrelid, ' ', r.oid, ' ', r.xmin),
				r.prrelid IN (SELECT oid FROM t)
			FROM pg_publication_rel r JOIN p ON r.prpubid = p.oid `+schemas+`)
		SELECT coalesce((SELECT version FROM p), ''),
			coalesce((SELECT concat(version, ' ', ARRAY(SELECT oid FROM t ORDER BY oid)) FROM c), ''),
			coalesce((SELECT format('publication %s: ', version) FROM p WHERE pubinsert)
				|| (SELECT string_agg(name, ', ' ORDER BY name) FROM m WHERE has), ''),
			ARRAY(SELECT version FROM m ORDER BY 1)`,
		publication, t.SQL()).
		Scan(&m.publication, &m.relation, &m.as, &m.members)
	if err != nil {
		return m, fmt.Errorf("read how publication %q has %s: %w", publication, t, err)
	}
	return m, nil
}

func (m membership) equal(other membership) bool {
	return m.publication == other.publication && m.relation == other.relation && m.as == other.as &&
		slices.Equal(m.members, other.members)
}

// Membership says how a publication has tables.
type Membership struct {
	Publication string
	Tables      []*outbox.Table

	of map[*outbox.Table]membership // set by Take
}

// Take reads it. It takes no lock on a table.
func (m *Membership) Take(ctx context.Context, conn *pgx.Conn) (err error) {
	m.of = map[*outbox.Table]membership{}
	for _, t := range m.Tables {
		if m.of[t], err = readMembership(ctx, conn, m.Publication, t); err != nil {
			return err
		}
	}
	return nil
}

// As says by what the publication has a table: catalog rows, which are others where the table was taken out
// and added again, or the publication was altered. It is "" where the publication does not bring inserts into
// the table.
func (m *Membership) As(t *outbox.Table) string { return m.of[t].as }

// PublicationLook says whether a publication brings every row of the tables.
type PublicationLook struct {
	Membership
	// Before is the look before this one, nil for the first.
	Before *PublicationLook

	problems map[*outbox.Table]error // nil where nothing is wrong
}

// Take looks. Where nothing has changed since the last look, it takes no lock on a table.
func (l *PublicationLook) Take(ctx context.Context, conn *pgx.Conn) (err error) {
	if err := l.Membership.Take(ctx, conn); err != nil {
		return err
	}
	if l.Before != nil && maps.EqualFunc(l.of, l.Before.of, membership.equal) {
		l.problems = l.Before.problems
	} else {
		l.problems = map[*outbox.Table]error{}
		for _, t := range l.Tables {
			if l.problems[t], err = publicationProblem(ctx, conn, l.Publication, t); err != nil {
				return err
			}
		}
	}
	l.Before = nil
	return nil
}

// Problem is what is wrong with the publication, nil where nothing is.
func (l *PublicationLook) Problem() error {
	for _, t := range l.Tables {
		if err := l.problems[t]; err != nil {
			return err
		}
	}
	return nil
}

// As is by what a publication has a table, as in [Membership.As], and "" where this look, which may be an
// earlier one or nil, has found that it brings rows in another way than it should. Of a table with a filter
// it is "" until a look has found that the filter is right: else rows might be another relay's.
func (l *PublicationLook) As(t *outbox.Table, now *Membership) string {
	switch {
	case l != nil && l.of[t].as == now.of[t].as:
		if l.problems[t] != nil {
			return ""
		}
	case t.FilterSQL("") != "":
		return ""
	}
	return now.As(t)
}

// publicationProblem tells what is wrong from what keeps that from being found out.
func publicationProblem(
	ctx context.Context, conn *pgx.Conn, name string, t *outbox.Table,
) (problem, err error) {
	err = CheckPublication(ctx, conn, name, []*outbox.Table{t})
	if hint.CodeOf(err) != "" || errors.Is(err, ErrNoPublication) {
		return err, nil
	}
	return nil, err
}
