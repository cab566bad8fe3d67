//go:build race

package cursor

// volumeDivisor makes tests of sheer volume smaller under the race detector, which costs them a factor of 50
// and has nothing to find in a package without goroutines.
const volumeDivisor = 20
