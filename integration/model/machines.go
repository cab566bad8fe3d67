package model

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"strings"
	"time"
)

// machine is one of the product's state machines with what its runner remembers for it.
type machine[E, O any] interface {
	// step takes an event and says what it leads to.
	step(e E) O
	// print writes all that its future depends on.
	print(b *fingerprint)
}

// machines numbers the states of one kind of machine. Number 0 is the state of a machine that was not started.
type machines[E, O any, M machine[E, O]] struct {
	start func(root E) M
	byKey map[string]uint32
	known []history[E]
	memo  map[memoKey]result[O]
	// note is told of each new state.
	note func(id uint32, m M)
}

type history[E any] struct {
	from  uint32 // 0: event starts the machine
	event E
}

type memoKey struct {
	from uint32
	what uint64
}

type result[O any] struct {
	to  uint32
	out O
}

func newMachines[E, O any, M machine[E, O]](start func(root E) M, note func(uint32, M)) *machines[E, O, M] {
	return &machines[E, O, M]{
		start: start, note: note, byKey: map[string]uint32{}, known: make([]history[E], 1), memo: map[memoKey]result[O]{},
	}
}

// rebuild returns a machine in state id.
func (k *machines[E, O, M]) rebuild(id uint32) M {
	var events []E
	for at := id; at != 0; at = k.known[at].from {
		events = append(events, k.known[at].event)
	}
	m := k.start(events[len(events)-1])
	for i := len(events) - 2; i >= 0; i-- {
		m.step(events[i])
	}
	return m
}

func (k *machines[E, O, M]) number(m M, from uint32, e E) uint32 {
	var f fingerprint
	m.print(&f)
	key := f.String()
	id, ok := k.byKey[key]
	if !ok {
		id = uint32(len(k.known))
		k.known = append(k.known, history[E]{from, e})
		k.byKey[key] = id
		k.note(id, m)
	}
	return id
}

// begin starts a machine.
func (k *machines[E, O, M]) begin(e E) uint32 { return k.number(k.start(e), 0, e) }

// step gives the machine in state id an event, which what stands for.
func (k *machines[E, O, M]) step(id uint32, what uint64, e func() E) (uint32, O) {
	r, ok := k.memo[memoKey{id, what}]
	if !ok {
		m, ev := k.rebuild(id), e()
		r.out = m.step(ev)
		r.to = k.number(m, id, ev)
		k.memo[memoKey{id, what}] = r
	}
	return r.to, r.out
}

// fingerprint is a text in which two machines are equal if they are.
type fingerprint struct {
	strings.Builder
	num [binary.MaxVarintLen64]byte
}

func (f *fingerprint) int(n int64) {
	f.Write(f.num[:binary.PutVarint(f.num[:], n)])
}

func (f *fingerprint) set(m map[[3]int]bool) {
	for e := range maxEntries {
		for i := range maxBookies {
			for j := range maxBookies {
				if m[[3]int{e, i, j}] {
					f.int(int64(e<<8 | i<<4 | j))
				}
			}
		}
	}
	f.int(-1)
}

// deep writes v with all that it points to, unexported fields too; skip names fields that do not matter.
func (f *fingerprint) deep(v reflect.Value, skip map[string]bool) {
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			f.int(1)
		} else {
			f.int(0)
		}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		f.int(v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		f.int(int64(v.Uint()))
	case reflect.String:
		f.int(int64(v.Len()))
		f.WriteString(v.String())
	case reflect.Slice, reflect.Array:
		f.int(int64(v.Len()))
		for i := range v.Len() {
			f.deep(v.Index(i), skip)
		}
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			f.int(0)
			return
		}
		f.int(1)
		f.deep(v.Elem(), skip)
	case reflect.Func:
		if !v.IsNil() {
			f.int(1)
		}
	case reflect.Struct:
		t := v.Type()
		for i := range v.NumField() {
			switch name := t.Name() + "." + t.Field(i).Name; {
			case t == reflect.TypeFor[time.Time](): // wall and ext say all
				if i < 2 {
					f.deep(v.Field(i), skip)
				}
			case skip[name] || spent(v, name):
			case name == "changeState.avoid":
				f.members(v.Field(i))
			default:
				f.deep(v.Field(i), skip)
			}
		}
	default:
		panic(fmt.Sprintf("model: a field of kind %s in a machine", v.Kind()))
	}
}

// members writes the bookies in a list that a writer avoids, for now: which they are is all that matters.
func (f *fingerprint) members(v reflect.Value) {
	var set int64
	for i := range v.Len() {
		set |= 1 << v.Index(i).FieldByName("uuid").Index(0).Uint()
	}
	f.int(set)
}
