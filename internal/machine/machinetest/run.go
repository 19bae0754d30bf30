package machinetest

import "testing"

// Check is one named promise of machine.Service.
type Check struct {
	Name string
	Run  func(t *testing.T, h *Harness)
}

// Run makes a fresh harness for every check.
func Run(t *testing.T, newHarness func(t *testing.T) *Harness) {
	for _, group := range [][]Check{endChecks(), orderChecks(), startChecks(), stateChecks(), churnChecks()} {
		for _, c := range group {
			t.Run(c.Name, func(t *testing.T) {
				t.Parallel()
				c.Run(t, newHarness(t))
			})
		}
	}
	for _, c := range outcomeChecks() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			c.Run(t, newHarness(t))
		})
	}
}
