package meta_test

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

// Any bytes under any key are a record or a typed error, never a panic, and what is accepted can be written.
func FuzzDecode(f *testing.F) {
	u := entry.UUID{1}
	for kind, m := range map[uint8]proto.Message{
		0: &metav1.Ledger{
			Ensemble: 1, WriteQuorum: 1, AckQuorum: 1, Entries: 5,
			Fragments: []*metav1.Fragment{{Slots: []*metav1.Slot{{Storage: u[:], Zone: "z"}}}},
			Pending:   []*metav1.Intent{{Target: u[:]}},
			Chain:     &metav1.Ledger_Data{Data: &metav1.DataChain{Topic: u[:], Index: 3}},
		},
		1:  &metav1.Chain{Bundle: "a/b/0", NextOffset: 9, LastLedger: 4, Runs: []*metav1.Run{{Ledger: 1, Closed: true, Span: 9}, {Ledger: 4, First: 9}}},
		2:  &metav1.Cluster{Uuid: u[:], FeatureLevel: 1},
		3:  &metav1.LedgerIds{Generation: 1, Next: 7},
		4:  &metav1.Cookie{Id: "k1", Storage: u[:]},
		5:  &metav1.Retired{Id: "k1", RetiredMs: 5},
		6:  &metav1.Owner{Broker: "b1", Epoch: 3},
		7:  &metav1.Epoch{Epoch: 3},
		8:  &metav1.Namespace{Bundles: []*metav1.BundleRange{{Last: 99}, {Number: 1, Last: 1<<32 - 1}}, Policies: &metav1.Policies{Ensemble: proto.Uint32(3)}},
		9:  &metav1.Topic{Uuid: u[:], Partitions: 3},
		10: &metav1.Broker{Id: "b1", Url: "u"},
		11: &metav1.Bookie{Id: "k1", Storage: u[:]},
		15: &metav1.Repair{Causes: 3, Storages: [][]byte{u[:]}, Stuck: "no bookie"},
		16: &metav1.RepairCensus{Auditor: "b1", Absent: []*metav1.AbsentBookie{{Storage: u[:]}}},
		13: &metav1.Mark{Kind: metav1.MarkKind_MARK_KIND_DEAD, Bookie: "k1", Operation: "op-1"},
		14: &metav1.Operation{
			Kind: metav1.OperationKind_OPERATION_KIND_RECOVER, Bookie: "k1", Storage: u[:], PauseAboveP99Us: 9,
			Blocks: []*metav1.OperationBlock{{Ledger: 4, Reason: "full"}},
		},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(kind, b)
		f.Add(kind, b[:len(b)-1])
	}
	f.Add(uint8(8), []byte{})
	f.Add(uint8(12), []byte("bookies/zz"))
	s := meta.New(etcd.Client(), "fuzz", nil)
	f.Fuzz(func(t *testing.T, kind uint8, value []byte) {
		err := s.DecodeAny(kind, value)
		var damaged *meta.CorruptRecordError
		if err != nil && (!errors.As(err, &damaged) || damaged.Key == "") {
			t.Fatalf("got %v, want an error that names the key", err)
		}
	})
}
