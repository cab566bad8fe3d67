package model

import (
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Shapes: ensemble, write quorum, ack quorum.
var (
	twoOfTwo    = meta.Replication{Ensemble: 2, WriteQuorum: 2, AckQuorum: 2}
	oneOfTwo    = meta.Replication{Ensemble: 2, WriteQuorum: 2, AckQuorum: 1}
	twoOfThree  = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2}
	striped     = meta.Replication{Ensemble: 3, WriteQuorum: 2, AckQuorum: 2}
	stripedOne  = meta.Replication{Ensemble: 3, WriteQuorum: 2, AckQuorum: 1}
	zonesOfFour = meta.Replication{Ensemble: 4, WriteQuorum: 4, AckQuorum: 2, MinZones: 2}
	zones       = meta.Replication{Ensemble: 3, WriteQuorum: 3, AckQuorum: 2, MinZones: 2}
	zonesOfTwo  = meta.Replication{Ensemble: 2, WriteQuorum: 2, AckQuorum: 2, MinZones: 2}
)

func levels(n int, l ledger.AckLevel) []ledger.AckLevel {
	all := make([]ledger.AckLevel, n)
	for i := range all {
		all[i] = l
	}
	return all
}

func cluster(name string, bookies int, r meta.Replication, entries int, with func(c *Config)) Config {
	c := Config{Name: name, Bookies: bookies, Replication: r, Levels: levels(entries, ledger.AckQuorum), Recoveries: 1}
	with(&c)
	return c
}

// Configs are the clusters whose rules must hold; in two of them, although a rule is left out.
func Configs() []Config {
	return []Config{
		cluster("recovery", 3, twoOfThree, 2, func(*Config) {}),
		cluster("recovery, three entries", 2, twoOfTwo, 3, func(*Config) {}),
		cluster("recovery ahead", 2, twoOfTwo, 3, func(c *Config) { c.Pipelined = true }),
		cluster("recovery replaces", 4, twoOfThree, 1, func(c *Config) { c.RecoveryFailures = 2; c.Pipelined = true }),
		cluster("recovery replaces twice", 4, twoOfTwo, 2, func(c *Config) { c.RecoveryFailures = 2; c.Pipelined = true }),
		cluster("two recoveries", 3, twoOfThree, 1, func(c *Config) { c.Recoveries = 2 }),
		cluster("two recoveries, two entries", 2, twoOfTwo, 2, func(c *Config) { c.Recoveries = 2 }),
		cluster("two recoveries replace", 3, twoOfTwo, 1, func(c *Config) { c.Recoveries = 2; c.RecoveryFailures = 2 }),
		cluster("two recoveries, old terms taken", 3, twoOfThree, 1, func(c *Config) { c.Recoveries = 2; c.Without = []string{"a bookie compares terms"} }),
		cluster("two recoveries, adds raise no term", 3, twoOfTwo, 1, func(c *Config) {
			c.Recoveries = 2
			c.RecoveryFailures = 1
			c.Without = []string{"a recovery's add raises the term"}
		}),
		cluster("two recoveries, one ack", 3, oneOfTwo, 1, func(c *Config) { c.Recoveries = 2; c.RecoveryFailures = 2 }),
		cluster("change", 4, twoOfThree, 1, func(c *Config) { c.Failures = 1; c.FailAt = []int{0} }),
		cluster("change, two entries", 3, twoOfTwo, 2, func(c *Config) { c.Failures = 1; c.FailAt = []int{0} }),
		cluster("change and back", 3, twoOfTwo, 1, func(c *Config) { c.Failures = 3 }),
		cluster("change, one ack", 3, oneOfTwo, 2, func(c *Config) { c.Failures = 1 }),
		cluster("change, two recoveries", 3, twoOfTwo, 1, func(c *Config) { c.Failures = 1; c.Recoveries = 2; c.RecoveryFailures = 1 }),
		cluster("change when needed", 4, twoOfThree, 1, func(c *Config) { c.Failures = 2; c.OnlyNeeded = true }),
		cluster("close", 3, twoOfTwo, 2, func(c *Config) { c.Failures = 1; c.FailAt = []int{0}; c.Close = true }),
		cluster("close, no answers", 3, twoOfTwo, 1, func(c *Config) { c.Failures = 1; c.Close = true; c.Lossy = true; c.Crash = true }),
		cluster("stripes", 4, striped, 2, func(c *Config) { c.Failures = 1 }),
		cluster("stripes, recovery replaces", 4, striped, 3, func(c *Config) { c.RecoveryFailures = 1 }),
		cluster("stripes, one ack", 4, stripedOne, 2, func(c *Config) { c.Failures = 1; c.RecoveryFailures = 1 }),
		cluster("level all", 4, twoOfThree, 1, func(c *Config) {
			c.Levels = levels(1, ledger.AckAll)
			c.Failures, c.RecoveryFailures, c.FailAt = 1, 2, []int{0}
		}),
		cluster("level all, recovery replaces", 5, twoOfThree, 1, func(c *Config) {
			c.Levels = levels(1, ledger.AckAll)
			c.RecoveryFailures = 2
		}),
		cluster("level all, two entries", 3, oneOfTwo, 2, func(c *Config) {
			c.Levels = levels(2, ledger.AckAll)
			c.Failures, c.RecoveryFailures = 1, 1
		}),
		cluster("levels mixed", 3, oneOfTwo, 3, func(c *Config) {
			c.Levels = []ledger.AckLevel{ledger.AckQuorum, ledger.AckAll, ledger.AckOne}
			c.Failures = 1
			c.FailAt = []int{0}
		}),
		cluster("level one, clean crash", 3, twoOfThree, 2, func(c *Config) {
			c.Levels = levels(2, ledger.AckOne)
			c.Dead, c.Crash, c.Patient, c.OneKept = true, true, true, true
		}),
		cluster("level one, change", 3, twoOfTwo, 2, func(c *Config) {
			c.Levels = []ledger.AckLevel{ledger.AckOne, ledger.AckNone}
			c.Failures = 1
			c.Close = true
		}),
		cluster("zones", 4, zonesOfFour, 1, func(c *Config) { c.Zones = "aabb" }),
		cluster("zones, change", 4, zones, 1, func(c *Config) { c.Zones = "aabb"; c.Failures = 1 }),
		cluster("zones, change, recovery replaces", 3, zonesOfTwo, 1, func(c *Config) { c.Zones = "abb"; c.Failures = 1; c.RecoveryFailures = 2; c.Recoveries = 2 }),
		cluster("disk lost", 4, twoOfThree, 1, func(c *Config) { c.Lost = 1; c.Failures = 1; c.FailAt = []int{0} }),
		cluster("disk lost, close", 4, twoOfThree, 1, func(c *Config) { c.Lost = 1; c.Close = true }),
		cluster("limbo", 3, twoOfThree, 1, func(c *Config) { c.Limbo = 1; c.Recoveries = 2 }),
		cluster("limbo, change", 4, twoOfThree, 1, func(c *Config) { c.Limbo = 1; c.Failures = 1; c.FailAt = []int{0} }),
		cluster("deletion", 2, twoOfTwo, 1, func(c *Config) { c.Admission, c.Delete, c.Collect, c.Close = true, true, true, true }),
		cluster("deletion, change", 3, twoOfTwo, 1, func(c *Config) { c.Admission, c.Delete, c.Collect, c.Close = true, true, true, true; c.Failures = 1 }),
		cluster("deletion, two recoveries", 2, twoOfTwo, 1, func(c *Config) { c.Admission, c.Delete, c.Collect = true, true, true; c.Recoveries = 2 }),
		cluster("repair", 4, twoOfTwo, 1, func(c *Config) {
			c.Repairs = 1
			c.Failures = 1
			c.FailAt = []int{0}
			c.Retire = true
			c.Admission = true
		}),
		cluster("repair, recovery replaces", 3, twoOfTwo, 1, func(c *Config) { c.Repairs = 1; c.RecoveryFailures = 1; c.Retire = true; c.Admission = true }),
		cluster("repair and collection", 3, twoOfTwo, 1, func(c *Config) { c.Repairs = 1; c.Collect, c.Close = true, true; c.Drops = 1; c.Admission = true }),
		cluster("repairs and collection", 3, twoOfTwo, 1, func(c *Config) {
			c.Repairs = 2
			c.Collect, c.Close = true, true
			c.Drops = 1
			c.Recoveries = 0
		}),
	}
}
