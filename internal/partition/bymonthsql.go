package partition

import (
	"fmt"
	"strings"
)

// leaveSQL takes from the table what the partitioned one is to have.
const leaveSQL = `
	SELECT format('DROP TRIGGER %I ON %s', tgname, $1::text) FROM pg_trigger
	WHERE tgrelid = to_regclass($1) AND NOT tgisinternal
	UNION ALL
	SELECT format('ALTER PUBLICATION %I DROP TABLE %s', p.pubname, $1::text)
	FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE r.prrelid = to_regclass($1)
	UNION ALL
	SELECT format('ALTER TABLE %s ALTER %I DROP IDENTITY', $1::text, attname) FROM pg_attribute
	WHERE attrelid = to_regclass($1) AND attidentity <> '' AND NOT attisdropped`

// grantsSQL gives the table $2 the privileges that others have on $1.
const grantsSQL = `
	SELECT format('GRANT %s ON %s TO %s%s', x.privilege_type, $2::text,
		CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)) END,
		CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
	FROM pg_class c, aclexplode(c.relacl) x WHERE c.oid = to_regclass($1) AND x.grantee <> c.relowner
	UNION ALL
	SELECT format('GRANT %s (%I) ON %s TO %s%s', x.privilege_type, a.attname, $2::text,
		CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)) END,
		CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
	FROM pg_attribute a, aclexplode(a.attacl) x WHERE a.attrelid = to_regclass($1) AND NOT a.attisdropped`

// takeOverSQL gives it to that: its owner, privileges, sequences, triggers and comment.
var takeOverSQL = `
	SELECT format('ALTER TABLE %s ALTER %I ADD GENERATED %s AS IDENTITY ('
			'START WITH %s INCREMENT BY %s CACHE %s)', $1::text, a.attname,
		CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END,
		coalesce(pg_sequence_last_value(s.seqrelid) + s.seqincrement, s.seqstart), s.seqincrement, s.seqcache)
	FROM pg_attribute a, pg_sequence s WHERE a.attrelid = to_regclass($1) AND a.attidentity <> ''
		AND s.seqrelid = pg_get_serial_sequence($1, a.attname)::regclass
	UNION ALL
	SELECT format('ALTER SEQUENCE %s OWNED BY %s.%I', d.objid::regclass, $1::text, a.attname)
	FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
	WHERE d.refobjid = to_regclass($1) AND d.classid = 'pg_class'::regclass AND d.deptype = 'a'
		AND EXISTS (SELECT FROM pg_sequence s WHERE s.seqrelid = d.objid)
	UNION ALL
	SELECT format('ALTER TABLE %s OWNER TO %I', $1::text, pg_get_userbyid(relowner))
	FROM pg_class WHERE oid = to_regclass($1)
	UNION ALL
	` + strings.ReplaceAll(grantsSQL, "$2", "$1") + `
	UNION ALL
	SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = to_regclass($1) AND NOT tgisinternal
	UNION ALL
	SELECT format('ALTER TABLE %s %s TRIGGER %I', $1::text,
		CASE tgenabled WHEN 'A' THEN 'ENABLE ALWAYS' WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'DISABLE' END,
		tgname)
	FROM pg_trigger WHERE tgrelid = to_regclass($1) AND NOT tgisinternal AND tgenabled <> 'O'
	UNION ALL
	SELECT format('COMMENT ON TABLE %s IS %L', $1::text, obj_description(to_regclass($1), 'pg_class'))
	WHERE obj_description(to_regclass($1), 'pg_class') IS NOT NULL`

// publishedSQL publishes the partitioned table where the old one was published. Column lists and filters came
// with PostgreSQL 15.
func publishedSQL(version int) string {
	columns, filter := "''", "''"
	if version >= 150000 {
		columns = `(SELECT ' (' || string_agg(quote_ident(a.attname), ', ') || ')' FROM pg_attribute a
			WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs))`
		filter = `' WHERE (' || pg_get_expr(r.prqual, r.prrelid) || ')'`
	}
	return fmt.Sprintf(`
		SELECT format('ALTER PUBLICATION %%I ADD TABLE %%s%%s%%s', p.pubname, $1::text, %s, %s)
		FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
		WHERE r.prrelid = to_regclass($1)`, columns, filter)
}
