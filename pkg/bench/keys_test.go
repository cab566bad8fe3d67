package bench

import "testing"

func TestKeysAreSpread(t *testing.T) {
	t.Parallel()
	const draws = 100_000
	count := func(d KeyDistribution, n int, producer uint64) map[string]int {
		s := Scenario{Keys: d, KeyCount: n}
		pick := keyPicker(s, keyTable(s), producer)
		counts := map[string]int{}
		for range draws {
			counts[pick()]++
		}
		return counts
	}
	if got := count(KeysNone, 10, 0); got[""] != draws {
		t.Errorf("without keys: %v", got)
	}
	for key, n := range count(KeysInTurn, 10, 3) {
		if n != draws/10 {
			t.Errorf("in turn: %s comes %d times", key, n)
		}
	}
	uniform := count(KeysUniform, 100, 0)
	for key, n := range uniform {
		if n < draws/100*8/10 || n > draws/100*12/10 {
			t.Errorf("uniform: %s comes %d times", key, n)
		}
	}
	if len(uniform) != 100 {
		t.Errorf("uniform: %d keys", len(uniform))
	}
	if first := count(KeysZipf, 10_000, 0)["key-0"]; first < draws/8 || first > draws/6 {
		t.Errorf("zipf: the first comes %d times, want about a seventh of %d", first, draws)
	}
	if len(count(KeysZipf, 1, 0)) != 1 || len(count(KeysInTurn, 1, 5)) != 1 {
		t.Error("one key is not one key")
	}
	if a, b := count(KeysUniform, 100, 1), count(KeysUniform, 100, 1); a["key-7"] != b["key-7"] {
		t.Error("a producer's keys differ from run to run")
	}
}
