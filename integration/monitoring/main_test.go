package monitoring

import (
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// read reads a file of the repository.
func read(t *testing.T, parts ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{"..", ".."}, parts...)...))
	check(t, err)
	return text
}

// bin is where the programs are.
func bin(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", "..", "bin"))
	check(t, err)
	for _, name := range []string{"etcd", "bookie", "broker", "penstock", "prometheus", "promtool"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Fatalf("these tests run the programs in %s, and %s is not there: run `make build bin/prometheus bin/promtool` first", dir, name)
		}
	}
	return dir
}
