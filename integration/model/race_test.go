//go:build race

package model

func init() { shortSet = 1000 }
