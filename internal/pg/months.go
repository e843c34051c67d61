package pg

import "time"

// Tables that are partitioned by time have a partition for each month, in UTC.

// MonthsAhead is how many months have a partition beside the present one.
const MonthsAhead = 2

// MonthCheck is the constraint that spares ATTACH PARTITION its search of the rows of a table that is to be
// one of them. It refuses rows of later months, until the table is a partition or that is given up.
const MonthCheck = "walpost_months"

// MonthOf is when the month of a time begins.
func MonthOf(t time.Time) time.Time {
	t = t.UTC()
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}

// MonthName is the name of a table's partition for a month.
func MonthName(table string, month time.Time) string { return table + "_" + month.Format("2006_01") }

// MonthBound is a time as a bound of a partition.
func MonthBound(t time.Time) string { return t.UTC().Format("'2006-01-02 15:04:05+00'") }
