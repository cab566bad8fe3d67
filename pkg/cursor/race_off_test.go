//go:build !race

package cursor

const volumeDivisor = 1
