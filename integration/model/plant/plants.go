package main

// plant is one bug: a line of the source, as it is and as the bug has it, and the cluster that shows it.
type plant struct {
	Name, Package, Cluster string
	// Old is in one place of the package's source, and becomes New.
	Old, New string
}

var plants = []plant{
	{
		"absence is decided by one denial", "pkg/ledger", "recovery",
		"		case c.q.Covers(ws, r.negative):", "		case r.negative != 0:",
	},
	{
		"no answer counts as a denial", "pkg/ledger", "disk lost",
		"		r.unknown |= 1 << slot\n", "		r.negative |= 1 << slot\n",
	},
	{
		"coverage is off by one", "pkg/quorum", "recovery",
		"func (q *Quorum) Covers(w, x Set) bool { return !q.Valid(w &^ x) }",
		"func (q *Quorum) Covers(w, x Set) bool { return x&w != 0 && (w&^x).Len() <= q.cfg.AckQuorum }",
	},
	{
		"a recovery starts at the LAC alone", "pkg/ledger", "change, two entries",
		"		c.base = max(c.f.First-1, c.maxLAC)\n", "		c.base = c.maxLAC\n",
	},
	{
		"the LAC moves with a recovery's writes", "pkg/ledger", "two recoveries",
		"func (c *RecoveryCore) Base() entry.EntryID { return c.base }", "func (c *RecoveryCore) Base() entry.EntryID { return c.cur }",
	},
	{
		"a recovery closes before its writes are acknowledged", "pkg/ledger", "recovery",
		"		if (r.acks&ws).Len() < c.m.AckQuorum ||", "		if (r.acks&ws).Len() < c.m.AckQuorum-1 ||",
	},
	{
		"a replacement need not take what it was chosen for", "pkg/ledger", "level all, recovery replaces",
		" || ws&c.replaced&^r.acks != 0 {", " {",
	},
	{
		"a recovery counts what a replaced bookie acknowledged", "pkg/ledger", "recovery replaces twice",
		"		r.acks &^= bad\n		r.asked &^= bad\n", "		r.asked &^= bad\n",
	},
	{
		"a recovery's new fragment starts where the old one did", "pkg/ledger", "recovery replaces twice",
		"	c.tail = append(slices.Clip(c.tail), meta.Fragment{First: c.wcur,", "	c.tail = append(slices.Clip(c.tail[:0]), meta.Fragment{First: c.f.First,",
	},
	{
		"entries are confirmed while an ensemble change is out", "pkg/ledger", "change",
		"	if c.phase == Active {\n		c.track.Advance", "	if c.phase != Closing {\n		c.track.Advance",
	},
	{
		"entries are confirmed while the end is proposed", "pkg/ledger", "close",
		"	if c.phase == Active {\n		c.track.Advance", "	if c.phase != Changing {\n		c.track.Advance",
	},
	{
		"acknowledgements of a replaced slot are kept", "pkg/ledger", "change, two entries",
		"	c.track.Prune(f.First, changed,", "	c.track.Prune(f.First, 0,",
	},
	{
		"an acknowledgement counts whoever sends it", "pkg/ledger", "change, two entries",
		"	if c.over() || c.slots[slot].uuid != uuid {\n		return\n	}\n	s := &c.slots[slot]\n	s.progress", "	if c.over() {\n		return\n	}\n	s := &c.slots[slot]\n	s.progress",
	},
	{
		"an ensemble change begins one entry late", "pkg/ledger", "change, two entries",
		"	first := c.track.LAC() + 1\n	if len(c.allQ) == 0 {", "	first := c.track.LAC() + 2\n	if len(c.allQ) == 0 {",
	},
	{
		"acknowledged by all after a quorum", "pkg/ledger", "level all",
		"		case c.track.Missing(e) == 0:\n", "		case c.track.Missing(e).Len() < 2:\n",
	},
	{
		"what is in flight is told not to be written", "pkg/ledger", "recovery",
		"		case e > c.sentTo:\n", "		case e > lac:\n",
	},
	{
		"a bookie that is retired is named anew", "pkg/meta", "repair, recovery replaces",
		"			t.compareUnretired(s, u)\n		case next", "		case next",
	},
	{
		"garbage collection does not look at intents", "pkg/bookie", "repair and collection",
		"		if intent.Target == me {\n			return true", "		if intent.Target == me {\n			return false",
	},
}
