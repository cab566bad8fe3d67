package model

import "strings"

// Mutations are clusters in which rules of the model's own parts are left out, and what must break for it. Where two
// are left out, either alone is enough to keep what breaks.
func Mutations() []Config {
	without := func(breaks string, c Config, rules ...string) Config {
		c.Without, c.Breaks, c.Name = rules, breaks, strings.Join(rules, "; ")
		return c
	}
	deletion := cluster("", 2, twoOfTwo, 1, func(c *Config) { c.Admission, c.Delete, c.Collect = true, true, true })
	return []Config{
		without("1:", cluster("", 3, twoOfThree, 1, func(*Config) {}), "a fence refuses writers"),
		without("1:", cluster("", 3, twoOfThree, 1, func(c *Config) { c.Known = true }), "a recovery's read fences"),
		without("1:", cluster("", 3, twoOfThree, 1, func(c *Config) { c.Admission = true }), "a fence of an unknown ledger is kept"),
		without("1:", cluster("", 2, twoOfTwo, 1, func(c *Config) { c.Close, c.Lossy = true, true }), "an unknown outcome ends the writer"),
		without("1:", deletion, "a bookie reads the record before a ledger is new to it", "a tombstone refuses writers"),
		without("1:", deletion, "admission compares the generation", "a tombstone refuses writers"),
		without("1:", cluster("", 3, twoOfThree, 1, func(c *Config) { c.Limbo = 1 }), "limbo denies nothing"),
		without("1:", cluster("", 3, twoOfThree, 1, func(c *Config) { c.Limbo = 1 }), "limbo refuses writers"),
		without("2:", cluster("", 3, twoOfTwo, 2, func(c *Config) { c.Repairs, c.Close, c.Recoveries = 1, true, 0 }), "a target proves that it has all entries"),
		without("16:", cluster("", 3, twoOfTwo, 1, func(c *Config) {
			c.Repairs, c.Close, c.Recoveries, c.Collect = 2, true, 0, true
		}), "what was added since the record was read is not deleted"),
	}
}
