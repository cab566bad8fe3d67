// Package figures turns what was measured into what people read: distributions of times, and tables.
//
//	var gaps figures.Sample
//	gaps.Add(gap)                                      // for each strike
//	fmt.Println(gaps.Percentile(0.99), gaps.Worst())
//	page.Row("kill -9 of the owner", figures.Milliseconds(gaps.Percentile(0.5)), gaps.Histogram())
//
// A [Sample] keeps every value: those of a hundred strikes, or of a minute of publishing, are few, and nothing needs to be
// rounded into buckets before the end. Percentiles are values that were measured, not interpolated between two.
package figures
