package embedetcd

import (
	"context"
	"fmt"
	"os"
)

// RunTests runs the tests of a package beside one member, which it puts into *etcd before and closes after them, and
// returns the code to exit with. leaks is asked at the end; an error of it fails the run:
//
//	func TestMain(m *testing.M) {
//		os.Exit(embedetcd.RunTests(&etcd, m.Run, func() error { return goleak.Find() }))
//	}
func RunTests(etcd **Server, tests func() int, leaks func() error) (code int) {
	failed := func(doing string, err error) int {
		fmt.Fprintf(os.Stderr, "%s: %v\n", doing, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "penstock-test-etcd-")
	if err != nil {
		return failed("make directory", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if *etcd, err = Start(context.Background(), Config{Dir: dir, UnsafeNoFsync: true}); err != nil {
		return failed("start etcd", err)
	}
	code = tests()
	if err := (*etcd).Close(); err != nil {
		return failed("close etcd", err)
	}
	if err := leaks(); err != nil {
		return failed("after the tests", err)
	}
	return code
}
