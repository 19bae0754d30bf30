package engine

import (
	"errors"
	"fmt"

	"imp.dev/imp/internal/machine/plan"
)

// errDied says that a failpoint ended the engine as the death of its process would.
var errDied = errors.New("the runtime died here")

// reach is called where a test may let the process die. Once it has, nothing is written and nothing is done any more: workers end
// without clearing away, as goroutines of a killed process do.
func (e *Engine) reach(point string) error {
	if e.died.Load() {
		return errDied
	}
	if e.config.Failpoint == nil {
		return nil
	}
	if err := e.config.Failpoint(point); err != nil {
		e.died.Store(true)
		e.end()
		return fmt.Errorf("%w: %s: %w", errDied, point, err)
	}
	return nil
}

// save writes a record.
func (e *Engine) save(id string, r plan.Record) error {
	if err := e.reach("before save"); err != nil {
		return err
	}
	if err := e.records.Save(id, r); err != nil {
		return err
	}
	return e.reach("after save")
}
