package machinetest

import "testing"

// Check is one named promise of machine.Service.
type Check struct {
	Name string
	Run  func(t *testing.T, h *Harness)
	// Images says that the check steers the image store, the network or the host's boot id.
	Images bool
}

// Run makes a fresh harness for every check.
func Run(t *testing.T, newHarness func(t *testing.T) *Harness) { run(t, newHarness, true) }

// RunWithoutImages leaves out the checks that steer the image store or the network, for a runtime that has its own.
func RunWithoutImages(t *testing.T, newHarness func(t *testing.T) *Harness) {
	run(t, newHarness, false)
}

func run(t *testing.T, newHarness func(t *testing.T) *Harness, images bool) {
	for _, group := range [][]Check{endChecks(), orderChecks(), startChecks(), stateChecks(), networkChecks(), churnChecks(), outcomeChecks(), supervisionChecks()} {
		for _, c := range group {
			if c.Images && !images {
				continue
			}
			t.Run(c.Name, func(t *testing.T) {
				t.Parallel()
				c.Run(t, newHarness(t))
			})
		}
	}
}
