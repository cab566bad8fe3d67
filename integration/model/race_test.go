//go:build race

package model

func init() { shortSet, mostHistories = 1000, 300 }
