//go:build race

package model

func init() { shortSet, mostHistories = 300, 100 }
