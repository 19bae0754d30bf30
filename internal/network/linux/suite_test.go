package linux

import (
	"testing"

	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/network/networktest"
)

func TestSuite(t *testing.T) {
	needRoot(t)
	networktest.Run(t, func(t *testing.T) *networktest.Harness {
		n := newSite(t, 1500).newNode(t)
		return &networktest.Harness{
			Network: n,
			Reopen:  func(t *testing.T) network.Network { n.reopen(t); return n },
			Fail: func(err error) {
				if err == nil {
					n.failing(nil)
					return
				}
				n.failing(func(step string) error {
					if step == "tap entries" {
						return err
					}
					return nil
				})
			},
			Residue: func(t *testing.T) []string { return n.residue(t) },
			Slow:    true,
		}
	})
}
