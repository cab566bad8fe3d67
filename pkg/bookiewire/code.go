package bookiewire

import "fmt"

// codeNames are the words for the codes, as errors, logs and metrics labels spell them.
var codeNames = map[Code]string{
	OK:           "OK",
	NoEntry:      "NoEntry",
	NoLedger:     "NoLedger",
	Unknown:      "Unknown",
	Fenced:       "Fenced",
	ReadOnly:     "ReadOnly",
	Overloaded:   "Overloaded",
	NotAdmitted:  "NotAdmitted",
	BadChecksum:  "BadChecksum",
	BadRequest:   "BadRequest",
	Disconnected: "Disconnected",
}

// String is the code's name, "Code(n)" for a number that this version does not know.
func (c Code) String() string {
	if name, ok := codeNames[c]; ok {
		return name
	}
	return fmt.Sprintf("Code(%d)", uint8(c))
}

// Negative reports whether the answer says that this identity cannot have had the entry. Only negatives
// count when a recovery decides where a ledger ends.
func (c Code) Negative() bool { return c == NoEntry || c == NoLedger }
