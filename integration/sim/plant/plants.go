package main

// plant is one bug: a line of the source, as it is and as the bug has it.
type plant struct {
	// Name says what is wrong.
	Name string
	// Package is where, from the module's root. Where the simulation has its own runner, that is what is changed.
	Package string
	// Old is in one place of the package's source, and becomes New.
	Old, New string
}

var plants = []plant{
	{
		"an answer does not wait for the disk", "pkg/segment",
		"	f := <-w.syncs\n	err := f.Datasync()\n", "	f := <-w.syncs\n	var err error\n",
	},
	{
		"the directory is not synced after the manifest", "pkg/ledgerstore",
		"	if err := fs.SyncDir(dir); err != nil {", "	if err := error(nil); err != nil {",
	},
	{
		"a fence is answered before it is on disk", "pkg/ledgerstore",
		"		c.raiseTerm(l, f.Term, it)", "		c.raiseTerm(l, f.Term, &item{})\n		c.reply(it, nil)",
	},
	{
		"a fence that repeats a term does not wait for what came before", "pkg/ledgerstore",
		"	case l != nil && f.Term == l.acceptedTerm:\n		it.ledger = l\n		c.behind(it)",
		"	case l != nil && f.Term == l.acceptedTerm:\n		it.ledger = l\n		c.reply(it, nil)",
	},
	{
		"a ledger that is not there is denied without a fence", "pkg/ledgerstore",
		"		if l == nil {\n			l = c.table.create(f.Ledger)\n		}\n", "		if l == nil {\n			c.reply(it, nil)\n			return\n		}\n",
	},
	{
		"an entry is denied before the fence is on disk", "integration/sim",
		"	if !r.Recovery {\n		answer()\n		return\n	}\n",
		"	if _, err := b.store.Read(context.Background(), bookiewire.Read{Ledger: r.Ledger, First: r.First, MaxEntries: 1, MaxBytes: 1}); !r.Recovery || err != nil {\n" +
			"		if r.Recovery {\n			b.store.Fence(bookiewire.Fence{Ledger: r.Ledger, Term: r.Term}, func(bookiewire.FenceReply, error) {})\n		}\n" +
			"		answer()\n		return\n	}\n",
	},
	{
		"a fence is forgotten in a restart", "pkg/ledgerstore",
		"		if c.Term >= l.term {", "		if c.Term > l.term+1 {",
	},
	{
		"an older term is let in", "pkg/ledgerstore",
		"	case l != nil && f.Term < l.acceptedTerm:", "	case l != nil && f.Term+1 < l.acceptedTerm:",
	},
	{
		"a writer is let in after a fence", "pkg/ledgerstore",
		"	case a.Recovery && a.Term < l.acceptedTerm, !a.Recovery && (l.acceptedTerm > 0 || l.acceptedLimbo):\n		c.refuse(it, fencedBy(l), l.acceptedTerm == l.term)\n		return\n	default:",
		"	case a.Recovery && a.Term < l.acceptedTerm:\n		c.refuse(it, fencedBy(l), l.acceptedTerm == l.term)\n		return\n	default:",
	},
	{
		"a copy is acknowledged before the first one is on disk", "pkg/ledgerstore",
		"		it.next, first.next = first.next, it\n", "		c.reply(it, nil)\n",
	},
	{
		"a torn tail is cut too far", "pkg/segment",
		"		if len(b) != batchHeaderSize+int(h.length) ||", "		if len(b) != batchHeaderSize+int(h.length) || len(b) > 4096 ||",
	},
	{
		"a recovery's reads do not fence", "pkg/ledger",
		"MaxBytes: 1, Recovery: true, Term: m.Term}", "MaxBytes: 1}",
	},
	{
		"absence is decided by one denial", "pkg/ledger",
		"		case c.q.Covers(ws, r.negative):", "		case r.negative != 0:",
	},
	{
		"no answer counts as a denial", "pkg/ledger",
		"		r.unknown |= 1 << slot\n", "		r.negative |= 1 << slot\n",
	},
	{
		"coverage is off by one", "pkg/quorum",
		"func (q *Quorum) Covers(w, x Set) bool { return !q.Valid(w &^ x) }",
		"func (q *Quorum) Covers(w, x Set) bool { return x&w != 0 && (w&^x).Len() <= q.cfg.AckQuorum }",
	},
	{
		"a ledger ends one entry early", "pkg/ledger",
		"				c.end, c.ended = c.cur-1, true", "				c.end, c.ended = max(c.base, c.cur-2), true",
	},
	{
		"the LAC moves with a recovery's writes", "pkg/ledger",
		"func (c *RecoveryCore) Base() entry.EntryID { return c.base }", "func (c *RecoveryCore) Base() entry.EntryID { return c.cur }",
	},
	{
		"a recovery closes before its writes are acknowledged", "pkg/ledger",
		"		if (r.acks&ws).Len() < c.m.AckQuorum ||", "		if (r.acks&ws).Len() < c.m.AckQuorum-1 ||",
	},
	{
		"entries are confirmed while an ensemble change is out", "pkg/ledger",
		"	c.phase = Changing\n", "",
	},
	{
		"acknowledgements of a replaced slot are kept", "pkg/ledger",
		"	c.track.Prune(f.First, changed,", "	c.track.Prune(f.First, 0,",
	},
	{
		"entries are confirmed while the end is proposed", "pkg/ledger",
		"	if c.phase == Active {\n		c.track.Advance", "	if c.phase != Changing {\n		c.track.Advance",
	},
	{
		"what is in flight is told not to be written", "pkg/ledger",
		"		case e > c.sentTo:\n", "		case e > lac:\n",
	},
	{
		"acknowledged by all after a quorum", "pkg/ledger",
		"		case c.track.Missing(e) == 0:\n", "		case c.track.Missing(e).Len() < 2:\n",
	},
	{
		"an unknown outcome is told as none", "pkg/meta",
		"	if ambiguous {\n		return ErrUnknownOutcome", "	if false {\n		return ErrUnknownOutcome",
	},
	{
		"an owner's transaction does not compare its epoch", "pkg/meta",
		"		t.compareEpoch(s, t.guard.Bundle, t.guard.Epoch)\n", "",
	},
	{
		"a takeover keeps the epoch", "pkg/meta",
		"Epoch: cur.epoch + 1}", "Epoch: max(1, cur.epoch)}",
	},
	{
		"a stale owner trims", "pkg/meta",
		"LedgerDeleting, next.lastOp\n		t := txn{guard: &g}", "LedgerDeleting, next.lastOp\n		t := txn{}",
	},
	{
		"a reader goes beyond what bookies know to be confirmed", "pkg/ledger",
		"			upTo = r.askLAC(ctx, first)", "			upTo = r.askLAC(ctx, first) + 1",
	},
	{
		"a chain's end leaves the last entry out", "pkg/chain",
		"it != c.unsent && it.Entry <= last; it = it.next {\n		end =", "it != c.unsent && it.Entry < last; it = it.next {\n		end =",
	},
	{
		"a roll forgets what it has to send again", "pkg/chain",
		"	c.unsent = c.head\n	if c.pending == 0 {", "	c.unsent = nil\n	if c.pending == 0 {",
	},
	{
		"compaction drops a fence", "pkg/ledgerstore",
		"		if going[l.termIn] && l.acceptedTerm == l.term {", "		if false {",
	},
	{
		"a failed read is taken for a deletion", "pkg/bookie",
		"	case err != nil:\n		return Skip\n", "	case err != nil:\n		return Delete\n",
	},
	{
		"garbage collection on an empty listing", "pkg/bookie",
		"		if err := c.pace(ctx); err != nil {",
		"		if _, found := slices.BinarySearch(placed.Ledgers, id); !found {\n			_ = c.store.DeleteLedger(ctx, id, c.store.Mark(id))\n			continue\n		}\n		if err := c.pace(ctx); err != nil {",
	},
	{
		"a record that is missing is taken for a deletion", "pkg/bookie",
		"			return Quarantine\n", "			return Delete\n",
	},
	{
		"a closed ledger is deleted where it is placed", "pkg/bookie",
		"	case l.State != meta.LedgerClosed || holds(l, me) || !here.Stored:", "	case l.State != meta.LedgerClosed || !here.Stored:",
	},
	{
		"a recovery's copy is answered before its fence is on disk", "pkg/ledgerstore",
		"		if it.rec.Term > l.term {", "		if it.rec.Term > l.acceptedTerm {",
	},
	{
		"a ledger that was taken over is taken for a new one", "pkg/chain",
		"		if err == nil && got.State != meta.LedgerOpen {", "		if false {",
	},
	{
		"a state log deletes a ledger that holds live records", "pkg/statelog",
		"		batch, waiting := l.index.toRewrite(runs[0].Ledger, ", "		batch, waiting := l.index.toRewrite(runs[0].Ledger-1, ",
	},
	{
		"a state record is done before it is confirmed", "pkg/statelog",
		"Span: 1, Time: now, Tag: b,", "Span: 1, Time: now, Tag: b, Level: 2,",
	},
	{
		"a rewritten record overrides its update", "pkg/statelog",
		"		if !l.index.current(r.it, r.at) || l.index.superseded(r.it) {", "		if !l.index.current(r.it, r.at) {",
	},
	{
		"a rewritten record overrides its owner's deletion", "pkg/statelog",
		" || x.pending[pendingKey{it.owner.name, \"\"}] > 0", "",
	},
	{
		"a state record that cannot be read is passed over", "pkg/statelog",
		"					s.gaps[h] = *missing\n", "					_ = h\n",
	},
	{
		"an owner's deletion leaves its records", "pkg/statelog",
		"			delete(x.owners, r.owner)\n		}\n		return\n", "		}\n		return\n",
	},
	{
		"a state record that may be stored is told not to be", "pkg/statelog",
		"	var orphans []*batch\n	lost := l.err\n", "	var orphans []*batch\n	if err != nil {\n		err = notWritten(err)\n	}\n	lost := l.err\n",
	},
	{
		"a lease that is gone is renewed for ever", "pkg/lease",
		"		case err == nil, errors.Is(err, rpctypes.ErrLeaseNotFound):\n			return\n", "",
	},
	{
		"a lease's deadline counts from the answer", "pkg/lease",
		"			g.extend(sent.Add(s.ttl))", "			_ = sent\n			g.extend(s.sched.Now().Add(s.ttl))",
	},
	{
		"a broker is not registered again under its next lease", "pkg/ownership",
		"		r.step(LeaseLost{})\n", "		r.step(LeaseLost{})\n		return\n",
	},
	{
		"a watch that goes on misses a revision", "pkg/meta",
		"c.Revision()+1, c.follow)", "c.Revision()+2, c.follow)",
	},
	{
		"etcd's going back is not noticed", "pkg/bookie",
		"	if rev < r.seen.highest && r.seen.back == 0 {", "	if false {",
	},
	{
		"the state of a topic outlives it", "pkg/subscription",
		"		err = b.erase(ctx, s)\n", "",
	},
	{
		"a placement does not compare what is retired", "pkg/meta",
		"	t.named = append(t.named, u)\n	t.compareRev(s.retiredKey(u), 0)\n", "	t.named = append(t.named, u)\n",
	},
	{
		"a producer's sequence is recorded before its batch is stored", "pkg/topic",
		"		p.state.enter(w)\n	}\n	t.c.Append",
		"		p.state.enter(w)\n		p.state.confirm(p.epoch, last, env.BrokerTime)\n	}\n	t.c.Append",
	},
	{
		"the sequence of a batch that failed is kept", "pkg/topic",
		"			if p.state != nil {\n				p.state.leave(p)\n			}\n			p.producer.missing",
		"			if p.state != nil {\n				p.state.confirm(p.epoch, p.last, 0)\n				p.state.leave(p)\n			}\n			p.producer.missing",
	},
	{
		"offsets of batches that failed are not taken back", "pkg/topic",
		"			t.next, t.failing = next, nil",
		"			t.next, t.failing = max(t.next, next), nil",
	},
	{
		"what follows a batch that failed is let in", "pkg/topic",
		"	case p.gap && env.FirstSeq > p.gapAt:",
		"	case false:",
	},
	{
		"a new incarnation does not wait for the old one's batches", "pkg/topic",
		"	case matters && len(s.inflight()) > 0:",
		"	case false:",
	},
	{
		"sequences are rebuilt from a part of the log", "pkg/topic",
		"	for r.Offset() < t.opened {",
		"	for r.Offset()+4 < t.opened {",
	},
	{
		"a snapshot of sequences claims what is under way", "pkg/topic",
		"	at, bytes := t.visible, t.appended",
		"	at, bytes := t.next, t.appended",
	},
	{
		"a topic is trimmed by its last subscription", "pkg/subscription",
		"		floor = min(floor, sub.trimFloor())",
		"		floor = sub.trimFloor()",
	},
	{
		"an acknowledgement is confirmed before it is durable", "pkg/cursor",
		"func (c *Cursor) Durable() Ticket { return Ticket(c.durable) }",
		"func (c *Cursor) Durable() Ticket { return Ticket(c.taken) }",
	},
	{
		"a page's snapshot claims the change after it", "pkg/cursor",
		"	v = binary.AppendUvarint(v, p.snapSeq)\n",
		"	v = binary.AppendUvarint(v, p.snapSeq+1)\n",
	},
	{
		"a seek does not begin a generation", "pkg/cursor",
		"	c.generation++\n",
		"	c.generation += 0\n",
	},
	{
		"what was acknowledged before a seek counts after it", "pkg/cursor",
		"func (c *Cursor) Ack(g Generation, end entry.Offset, ranges ...Range) (Ticket, error) {\n	if g != c.generation {",
		"func (c *Cursor) Ack(g Generation, end entry.Offset, ranges ...Range) (Ticket, error) {\n	if g > c.generation {",
	},
	{
		"a subscription is there before it is durable", "pkg/subscription",
		"		return sub, false, sub.awaitMade(ctx) //",
		"		return sub, false, nil //",
	},
	{
		"what waits to be sent is passed over when consumers cannot take it", "pkg/dispatch",
		"		b.pos = min(b.pos, b.ready.front().first())\n",
		"",
	},
	{
		"what a consumer held is not delivered again", "pkg/dispatch",
		"		s.due.AddAll(s.giveBack(c, cursor.Range{End: ^entry.Offset(0)}, time.Time{}, cursor.RetryConsumerGone))",
		"		s.giveBack(c, cursor.Range{End: ^entry.Offset(0)}, time.Time{}, cursor.RetryConsumerGone)",
	},
	{
		"a step back goes to what was given back alone", "pkg/dispatch",
		"	if held := o.giveBack(c, cursor.Range{First: from, End: ^entry.Offset(0)}, notBefore, why); len(held) > 0 {",
		"	if held := o.giveBack(c, cursor.Range{First: from, End: from + 1}, notBefore, why); len(held) > 0 {",
	},
	{
		"a dispatch does not hear of a seek", "pkg/subscription",
		"			s.runner.Seek(generation, to)\n",
		"			_ = generation\n",
	},
	{
		"a subscription of before goes on changing the log", "pkg/subscription",
		"	case s.ended:\n		return fmt.Errorf(", "	case false:\n		return fmt.Errorf(",
	},
	{
		"a replica is swapped before its copies are there", "pkg/repair",
		"		if err := c.send(ctx, x, mine); err != nil {", "		if err := c.send(ctx, x, mine[:0]); err != nil {",
	},
	{
		"garbage collection does not look at intents", "pkg/bookie",
		"		if intent.Target == me {\n			return true", "		if intent.Target == me {\n			return false",
	},
	{
		"a swap does not need its intent", "pkg/meta",
		"		if !slices.ContainsFunc(cur.Pending,", "		if false && !slices.ContainsFunc(cur.Pending,",
	},
	{
		"a repair does not send what is there", "integration/sim",
		"Slot: x.slot, To: x.target.UUID,\n	})", "Slot: x.slot, To: x.target.UUID,\n		Skip: func(e entry.EntryID) bool {\n			b := w.bookieOf(x.target.UUID)\n			return b != nil && b.has(x.ledger.ID, e, w.ghost.bodies[entryKey{x.ledger.ID, e}].whole)\n		},\n	})",
	},
	{
		"an add makes a ledger known whatever its record says", "pkg/bookie",
		"refusal := Admit(l, a.cfg.Me, &x.Add.Add); refusal != nil {", "refusal := Admit(l, a.cfg.Me, &x.Add.Add); refusal != nil && l.State == meta.LedgerDeleting {",
	},
	{
		"an add is let in by what was read before it came", "pkg/bookie",
		"	for _, x := range round {\n		switch {\n		case errors.Is(err, meta.ErrNotFound):",
		"	a.mu.Lock()\n	round = append(round, a.waiting[ledger]...)\n	a.waiting[ledger] = nil\n	a.mu.Unlock()\n	for _, x := range round {\n		switch {\n		case errors.Is(err, meta.ErrNotFound):",
	},
	{
		"a full disk stops the store", "pkg/ledgerstore",
		"func shortage(err error) bool { return errors.Is(err, syscall.ENOSPC) || noFiles(err) }", "func shortage(err error) bool { return noFiles(err) }",
	},
	{
		"a store that was full stays so", "pkg/ledgerstore",
		"		c.spaceOut, c.noNext, c.noFiles, c.exhausted, c.stalled = false, false, false, false, false", "		c.noNext, c.noFiles, c.exhausted, c.stalled = false, false, false, false",
	},
	{
		"want of file descriptors stops the store", "pkg/ledgerstore",
		"func noFiles(err error) bool { return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) }", "func noFiles(error) bool { return false }",
	},
	{
		"a read-only file system is taken for a full one", "pkg/ledgerstore",
		"	case errors.Is(ev.Err, syscall.ENOSPC):\n		c.refuseForSpace(b)", "	case errors.Is(ev.Err, syscall.ENOSPC), errors.Is(ev.Err, syscall.EROFS):\n		c.refuseForSpace(b)",
	},
	{
		"an add that finds no room is not answered", "pkg/ledgerstore",
		"		c.reply(it, c.short())\n	}\n	clear(", "	}\n	clear(",
	},
	{
		"a budget grants more than it has", "pkg/budget",
		"b.used == 0 || b.used+n <= b.capacity }", "b.used == 0 || b.used+n <= 8*b.capacity }",
	},
	{
		"consumers are sent more than they have permitted", "pkg/dispatch",
		"		c.permits -= int64(messages)\n", "		c.permits -= int64(messages) / 2\n",
	},
	{
		"an append that fails is not answered", "pkg/chain",
		"			if a.Item.Load.Done != nil {", "			if a.Item.Load.Done != nil && c.appendError(a) == nil {",
	},
	{
		"an old copy of a disk is let in", "pkg/bookie",
		"	if record.Starts > s.known {", "	if false {",
	},
	{
		"a disk without its log is let in", "pkg/bookie",
		"		case !holds:", "		case !holds && err != nil:",
	},
	{
		"a reader's LAC falls", "pkg/ledger",
		"	r.lac = max(r.lac, lac)\n", "	r.lac = lac\n",
	},
}
