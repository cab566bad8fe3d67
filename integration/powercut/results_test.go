//go:build linux && !noroot

package powercut

import (
	"fmt"
	"strings"

	"github.com/penstock-mq/penstock/integration/volume"
)

// report is the page of results.
func report(lanes []*lane, commit string) string {
	var b strings.Builder
	b.WriteString(`# Power cuts of a store

Written by ` + "`make test-powercut`" + `. A process uses a bookie's store on a real file system (pkg/ledgerstore; adds, fences, LACs, recoveries'
writes, limbo, deletion, compaction at once, small segments) until the file system's shutdown ioctl stops the disk; then the
volume is mounted again, and everything acknowledged or read before is compared. "Log dropped" loses what the file system had
not synced; "log kept" writes out its own log first, so that names and sizes outlive the bytes they stand for.

| | cuts | of them while the store started | lost or wrong |
|---|---|---|---|
`)
	each := func(row func(name string, t *tally)) {
		for _, l := range lanes {
			for _, how := range []volume.How{volume.DropLog, volume.KeepLog} {
				if t := l.sums[how]; t != nil && t.Cuts > 0 {
					row(fmt.Sprintf("%s, %v", l.kind, how), t)
				}
			}
		}
	}
	each(func(name string, t *tally) {
		fmt.Fprintf(&b, "| %s | %d | %d | 0 |\n", name, t.Cuts, t.DuringStart)
	})
	b.WriteString(`
What was acknowledged before the cuts, and how many entries were read and compared after them:

| | entries | fences | LACs | changes of limbo | deletions | compactions | entries compared |
|---|---|---|---|---|---|---|---|
`)
	each(func(name string, t *tally) {
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d | %d | %d |\n",
			name, t.Entries, t.Fences, t.LACs, t.Limbos, t.Deletions, t.Compactions, t.Read)
	})
	b.WriteString(`
Entries that were on their way, without an answer, when the power went: which of them are found is chance.

| | there | gone |
|---|---|---|
`)
	each(func(name string, t *tally) {
		fmt.Fprintf(&b, "| %s | %d | %d |\n", name, t.UnansweredThere, t.UnansweredGone)
	})
	fmt.Fprintf(&b, "\nThe store was built from `%s`.\n", commit)
	return b.String()
}
