package sim

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/sched"
)

// deletionPatience is the product's.
const deletionPatience = time.Minute

// topicChanged looks at what a transaction did to a topic's record.
func (m *messaging) topicChanged(name string) {
	i := slices.Index(m.names, name)
	if i < 0 {
		return
	}
	now, err := m.w.checker.GetTopic(context.Background(), name)
	was := m.topics[i]
	switch {
	case errors.Is(err, meta.ErrNotFound):
		m.removed(was)
	case err != nil:
		m.w.fail("deletion", m.subject(), "record of topic %s: %v", name, err)
	case was == nil || was.uuid != now.UUID:
		if slices.ContainsFunc(m.all, func(t *dataTopic) bool { return t.uuid == now.UUID }) {
			m.w.fail("deletion", m.subject(), "topic %s comes back after its deletion", name)
		}
		if was != nil && !was.gone {
			m.w.fail("deletion", was.subject(), "%s is replaced, and was not deleted", was.name)
		}
		m.newTopic(i, now)
	case now.Deleting && !was.deleting:
		m.w.trace("etcd", was.subject(), "%s is marked to be deleted", was.name)
		was.deleting = true
	}
}

// removed is the end of a topic's record: nothing of it is left but tombstones.
func (m *messaging) removed(t *dataTopic) {
	w := m.w
	w.trace("etcd", t.subject(), "%s is gone", t.name)
	t.gone = true
	w.deletions++
	if !t.deleting {
		w.fail("deletion", t.subject(), "the record of %s is gone, and nobody asked for that", t.name)
	}
	if c, err := w.checker.GetChain(context.Background(), t.chain); err != nil || c.Rev != 0 {
		w.fail("deletion", t.subject(), "the record of %s is gone, and not its chain; error %v", t.name, err)
	}
	for _, id := range slices.Sorted(maps.Keys(w.ghost.ledgers)) {
		if l := w.ghost.ledgers[id]; l.record.Chain == t.chain && l.record.State != meta.LedgerDeleting {
			w.fail("deletion", ledgerSubject(l.record.ID), "the record of %s is gone, and its ledger %d is %s", t.name, l.record.ID, l.record.State)
		}
	}
}

// checkGone holds what a state log has, as whoever opened it reads it, against what was deleted before. The deletion may
// lie in an entry that cannot be read: then the log refuses to say what there is.
func (s *servedBundle) checkGone(gone []*dataTopic) {
	owners := s.state.Owners()
	for _, t := range gone {
		if slices.Contains(owners, t.owner) && s.state.Unreadable(t.owner) == nil {
			s.m.w.fail("deletion", t.subject(), "%s is gone, and %s finds it in the state log", t.name, s.b.name)
		}
	}
}

// gone are the topics that are.
func (m *messaging) gone() []*dataTopic {
	return slices.DeleteFunc(slices.Clone(m.all), func(t *dataTopic) bool { return !t.gone })
}

// record returns a topic's record, as brokers find it.
func (b *broker) record(ctx context.Context, name string) (meta.Topic, error) {
	if r, ok := b.cache.Topic(name); ok {
		return r, nil
	}
	return b.meta.GetTopic(ctx, name) //nolint:wrapcheck // it says what failed
}

// find returns a topic that is open here, for a client. One that is not there is made.
func (s *servedBundle) find(ctx context.Context, i int) *servedTopic {
	name := s.m.names[i]
	r, err := s.b.record(ctx, name)
	if errors.Is(err, meta.ErrNotFound) {
		r, err = s.b.meta.CreateTopic(ctx, name, 0)
		s.m.w.trace(s.b.name, s.m.subject(), "makes topic %s: error %v", name, err != nil)
	}
	st := s.topic(i)
	if err != nil || r.Deleting || st == nil || st.t.uuid != r.UUID {
		return nil
	}
	return st
}

// await serves a topic until it is lost, or somebody wants it deleted.
func (st *servedTopic) await() error {
	s := st.s
	for !st.ended {
		changed := s.b.cache.Changed(meta.KindTopics)
		if r, ok := s.b.cache.Topic(st.record.Name); ok && r.Deleting && r.UUID == st.t.uuid {
			return s.delete(st, r)
		}
		if i, _ := s.b.sched.Wait(s.ctx, sched.Channels{st.log.Lost(), changed}); i <= 0 {
			break
		}
	}
	var lost error
	if s.ctx.Err() == nil && !s.closed { // else whoever ended it drops the topic
		lost = st.log.Err()
		s.drop(st)
	}
	return lost //nolint:wrapcheck // it says what was lost
}

// delete carries the deletion of a topic out, as far as it gets.
func (s *servedBundle) delete(st *servedTopic, record meta.Topic) error {
	if st.ended {
		return errMoved
	}
	st.ended = true
	w := s.m.w
	_ = st.tidying.Take(context.Background(), s.b.sched)
	defer st.tidying.Give()
	ctx, cancel := s.b.sched.WithTimeout(s.ctx, deletionPatience)
	defer cancel()
	w.trace(s.b.name, st.t.subject(), "deletes %s", st.t.name)
	err := s.subs.Delete(ctx, st.set)
	s.subs.Forget(st.set)
	if s.topics[st.t] == st {
		delete(s.topics, st.t)
	}
	st.disconnect()
	if err == nil {
		err = s.b.meta.DeleteTopic(ctx, record)
	}
	w.trace(s.b.name, st.t.subject(), "has deleted %s: error %v", st.t.name, err != nil)
	return err
}

// deleteTopic has a client delete a topic, at any broker.
func (m *messaging) deleteTopic(c *conn, name string) {
	w, b := m.w, c.b
	ctx, cancel := b.sched.WithTimeout(c.ctx, w.between(0, 20*time.Second))
	defer cancel()
	marked, err := b.meta.MarkTopicDeleting(ctx, name)
	w.trace(b.name, m.subject(), "is to delete topic %s: error %v", name, err != nil)
	if err != nil || b.cache.TopicGone(ctx, marked) != nil {
		return
	}
	for _, t := range m.all {
		if t.uuid == marked.UUID && !t.gone {
			w.fail("deletion", t.subject(), "the deletion of %s is confirmed, and its record is there", t.name)
		}
	}
}

func (m *messaging) subject() subject { return subject{topic: m.tp.index + 1} }

// topicsChanged tells the kinds what a transaction did to topics.
func (w *world) topicsChanged(key string) {
	name, ours := strings.CutPrefix(key, "view/topics/")
	if !ours {
		return
	}
	for _, tp := range w.topics {
		if m, ok := tp.kind.(*messaging); ok {
			m.topicChanged(name)
		}
	}
}

// vanish sees what was deleted leave the disks.
func (w *world) vanish() {
	left := func() (entry.LedgerID, *bookieProcess) {
		for _, b := range w.bookies {
			for _, l := range w.ghost.deleting {
				if b.store == nil {
					return l, b
				}
				if _, stored := b.store.Ledger(l); stored && !b.rotten {
					return l, b
				}
			}
		}
		return 0, nil
	}
	w.run(w.now+vanishWithin, func() bool {
		if w.steps%1000 != 0 {
			return w.failed()
		}
		_, b := left()
		return w.failed() || b == nil
	})
	if l, b := left(); b != nil {
		w.fail("deletion", ledgerSubject(l), "ledger %d lies on %s still %v after everything was healed", l, b.name, vanishWithin)
	}
}

// vanishWithin leaves time for passes that delete a quarter of what there is.
const vanishWithin = 10 * time.Minute

// chainEnds looks at the chain of a topic that is being deleted: once the topic is gone, it does not come back.
func (m *messaging) chainEnds(t *dataTopic) {
	if c, err := m.w.checker.GetChain(context.Background(), t.chain); t.gone && (err != nil || c.Rev != 0) {
		m.w.fail("deletion", t.subject(), "the chain of %s comes back; error %v", t.name, err)
	}
}
