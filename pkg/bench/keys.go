package bench

import (
	"math/rand/v2"
	"strconv"
)

// zipfExponent makes few keys frequent: of 10,000, the first has about a seventh of the messages.
const zipfExponent = 1.1

// keyTable is every key of a run, made once.
func keyTable(s Scenario) []string {
	if s.Keys == KeysNone {
		return nil
	}
	keys := make([]string, s.KeyCount)
	for i := range keys {
		keys[i] = "key-" + strconv.Itoa(i)
	}
	return keys
}

// keyPicker returns what gives one producer its keys. The same producer of the same scenario has the same keys in each run.
func keyPicker(s Scenario, keys []string, producer uint64) func() string {
	r := rand.New(rand.NewPCG(1, producer)) //nolint:gosec // not a secret
	n := uint64(len(keys))
	switch s.Keys {
	case KeysInTurn:
		next := producer % n
		return func() string {
			k := keys[next]
			next = (next + 1) % n
			return k
		}
	case KeysUniform:
		return func() string { return keys[r.Uint64N(n)] }
	case KeysZipf:
		z := rand.NewZipf(r, zipfExponent, 1, n-1)
		return func() string { return keys[z.Uint64()] }
	default:
		return func() string { return "" }
	}
}
