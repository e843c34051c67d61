package partition

import "time"

// Tables that are partitioned by time have a partition for each month, in UTC.

// MonthsAhead is how many months have a partition beside the present one.
const MonthsAhead = 2

// MonthOf is when the month of a time begins.
func MonthOf(t time.Time) time.Time {
	t = t.UTC()
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}

// MonthName is the name of a table's partition for a month.
func MonthName(table string, month time.Time) string { return table + "_" + month.Format("2006_01") }

// Month is the partition of a month.
func (t *Table) Month(month time.Time) Part {
	return t.part(MonthName(t.Name, month), month.Unix(), month.AddDate(0, 1, 0).Unix())
}

// MonthBound is a time as a bound of a partition.
func MonthBound(t time.Time) string { return Months.bound(t.Unix()) }
