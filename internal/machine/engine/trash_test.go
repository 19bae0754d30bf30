package engine

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/plan"
	"imp.dev/imp/internal/record"
	"imp.dev/imp/internal/vmm"
)

// trashRig is an engine without a loop, with the VM a on record.
type trashRig struct {
	*testing.T
	engine *Engine
	clock  *clocktesting.FakeClock
	worker *worker
}

const (
	baseA = "sha256:aaaa"
	baseB = "sha256:bbbb"
)

func newTrashRig(t *testing.T, change func(*plan.Record)) *trashRig {
	t.Helper()
	root, log := t.TempDir(), slog.New(slog.DiscardHandler)
	clock := clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	records, err := OpenRecords(root, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = records.Close() })
	e := &Engine{
		paths: paths{state: filepath.Join(root, "vm"), run: filepath.Join(root, "run"), trash: filepath.Join(root, "trash")},
		clock: clock, log: log, workers: map[string]*worker{}, records: records, hub: newHub(),
	}
	e.trash.dir, e.trash.clock = e.paths.trash, clock
	for _, dir := range []string{e.paths.dir("a"), e.paths.trash} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r := haltedRecord()
	if change != nil {
		change(&r)
	}
	e.workers["a"] = newWorker(e, "a", r)
	return &trashRig{T: t, engine: e, clock: clock, worker: e.workers["a"]}
}

// haltedRecord is a VM that was accepted and has a disk, and has never been started.
func haltedRecord() plan.Record {
	r := plan.New(machine.Spec{ID: "a", Namespace: "ns", Name: "web", Assignment: 1, DiskGiB: 2, Image: machine.Image{Reference: "r"}}, time.Unix(0, 0))
	r.Image = &plan.Image{Reference: "r", Digest: baseA}
	r.Disk = &plan.Disk{BaseDigest: baseA, GiB: 2}
	r.DiskGeneration = 1
	return r
}

func (r *trashRig) writeDisk(content string) {
	r.Helper()
	if err := os.WriteFile(r.engine.paths.private("a"), []byte(content), 0o600); err != nil {
		r.Fatal(err)
	}
}

// discard puts a disk of that content and base into the trash.
func (r *trashRig) discard(content, base string) {
	r.Helper()
	r.writeDisk(content)
	of := haltedRecord()
	of.Disk.BaseDigest = base
	if err := r.engine.discard(r.engine.paths.private("a"), of, "the test wants it"); err != nil {
		r.Fatal(err)
	}
}

// trashed gives the contents of the disks in the trash by name.
func (r *trashRig) trashed() map[string]string {
	r.Helper()
	all, err := r.engine.Trash(r.Context())
	if err != nil {
		r.Fatal(err)
	}
	out := map[string]string{}
	for _, d := range all {
		content, err := os.ReadFile(r.engine.trash.disk(d.Name))
		if err != nil {
			r.Fatal(err)
		}
		out[d.Name] = string(content)
	}
	return out
}

func (r *trashRig) emptyTrash() []string {
	r.Helper()
	left, err := r.engine.emptyTrash()
	if err != nil {
		r.Fatal(err)
	}
	return left
}

func (r *trashRig) files() []string {
	r.Helper()
	entries, err := os.ReadDir(r.engine.paths.trash)
	if err != nil {
		r.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (r *trashRig) disk() string {
	r.Helper()
	content, err := os.ReadFile(r.engine.paths.private("a"))
	if err != nil {
		r.Fatal(err)
	}
	return string(content)
}

func TestADiskInTheTrashIsNotReplacedByALaterOneOfItsVM(t *testing.T) {
	r := newTrashRig(t, nil)
	for _, content := range []string{"first", "second", "third"} {
		r.discard(content, baseA)
	}
	if got := r.trashed(); len(got) != 3 || got["a.1"] != "first" || got["a.2"] != "second" || got["a.3"] != "third" {
		t.Errorf("the trash holds %v", got)
	}
	if err := r.engine.discard(r.engine.paths.private("a"), haltedRecord(), "again"); err != nil || len(r.files()) != 6 {
		t.Errorf("discarding a disk that is not there: %v, files %v", err, r.files())
	}
}

func TestTheTrashTellsWhatADiskIsAndUntilWhenItIsKept(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("x", baseB)
	all, err := r.engine.Trash(t.Context())
	if err != nil || len(all) != 1 {
		t.Fatalf("%v, %v", all, err)
	}
	want := machine.Discarded{
		Name: "a.1", ID: "a", VMNamespace: "ns", VM: "web", BaseDigest: baseB, GiB: 2, Bytes: all[0].Bytes,
		DiscardedAt: r.clock.Now(), ExpiresAt: r.clock.Now().Add(72 * time.Hour), Why: "the test wants it",
	}
	if all[0] != want || want.Bytes <= 0 {
		t.Errorf("got %+v, want %+v", all[0], want)
	}
}

func TestADiskLeavesTheTrashAfterThreeDaysAndNotBefore(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("old", baseA)
	r.clock.Step(time.Hour)
	r.discard("young", baseA)
	r.clock.Step(71*time.Hour - time.Second)
	r.emptyTrash()
	if got := r.trashed(); len(got) != 2 {
		t.Fatalf("before its time: %v", got)
	}
	r.clock.Step(time.Second)
	r.emptyTrash()
	if got := r.files(); !slices.Equal(got, []string{"a.2.ext4", "a.2.json"}) {
		t.Errorf("after 72 hours: %v", got)
	}
}

func TestWhatACrashLeavesInTheTrashIsClearedAwayAndNoDiskWithIt(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("kept", baseA)
	for _, name := range []string{"b.1.json", record.TempPrefix + "1234"} {
		if err := os.WriteFile(filepath.Join(r.engine.paths.trash, name), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if left := r.emptyTrash(); len(left) != 2 {
		t.Errorf("it says that it removed %v", left)
	}
	if got := r.files(); !slices.Equal(got, []string{"a.1.ext4", "a.1.json"}) {
		t.Errorf("the trash holds %v", got)
	}
}

func TestADiskOfAnEarlierVersionWithoutANoteIsListedByWhatItsNameTells(t *testing.T) {
	r := newTrashRig(t, nil)
	for _, name := range []string{"a.1", "b.orphan"} {
		if err := os.WriteFile(r.engine.trash.disk(name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(r.engine.trash.note("a.1"), []byte(`{"Name": "a`), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := r.engine.Trash(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%v, %v", all, err)
	}
	for _, d := range all {
		if id, _, _ := strings.Cut(d.Name, "."); d.ID != id || d.GiB != 1 || d.BaseDigest != "" || time.Since(d.DiscardedAt) > time.Hour {
			t.Errorf("%+v", d)
		}
	}
}

func TestTheDiskOfAVMWithoutARecordIsKeptInTheTrash(t *testing.T) {
	r := newTrashRig(t, nil)
	r.writeDisk("what a user wrote")
	if err := r.engine.clear("a", r.engine.paths.dir("a")); err != nil {
		t.Fatal(err)
	}
	if got := r.trashed(); len(got) != 1 || got["a.1"] != "what a user wrote" {
		t.Errorf("the trash holds %v", got)
	}
	if _, err := os.Stat(r.engine.paths.dir("a")); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
	if err := r.engine.clear("b", r.engine.paths.volatile("b")); err != nil {
		t.Errorf("clearing a directory without a disk: %v", err)
	}
}

func TestADiskOfTheTrashIsGivenBackAndTheVMsOwnTakesItsPlace(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("lost", baseA)
	r.writeDisk("own")
	if err := r.engine.Restore(t.Context(), "a.1", "a"); err != nil {
		t.Fatal(err)
	}
	if got := r.disk(); got != "lost" {
		t.Errorf("the VM's disk holds %q", got)
	}
	if got := r.trashed(); len(got) != 1 || got["a.2"] != "own" {
		t.Errorf("the trash holds %v", got)
	}
	loaded, err := r.engine.records.Load()
	if err != nil {
		t.Fatal(err)
	}
	got := loaded.Records["a"]
	if got.Disk == nil || got.Disk.BaseDigest != baseA || got.Disk.GiB != 2 || got.DiskGeneration != 2 {
		t.Errorf("the record says %+v, generation %d", got.Disk, got.DiskGeneration)
	}
	// What was decided before the disk was there must not take it for a leftover.
	if err := r.worker.doEnsureDisk(t.Context(), plan.Step{Kind: plan.EnsureDisk}); err != nil || r.disk() != "lost" {
		t.Errorf("a disk step that came late: %v, the disk holds %q", err, r.disk())
	}
}

func TestARestoreThatFailsLeavesEveryDiskWhereItWas(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("lost", baseA)
	r.writeDisk("own")
	// A directory in the place of the record's file makes its commit fail.
	blocked := filepath.Join(filepath.Dir(r.engine.paths.state), "records", "a.json")
	if err := os.Mkdir(blocked, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.engine.Restore(t.Context(), "a.1", "a"); !fault.Is(err, fault.DiskFailed) {
		t.Fatalf("got %v", err)
	}
	if got := r.trashed(); r.disk() != "own" || len(got) != 1 || got["a.1"] != "lost" {
		t.Errorf("the VM's disk holds %q, the trash %v", r.disk(), got)
	}
	if g := r.worker.recordNow().DiskGeneration; g != 1 {
		t.Errorf("the generation is %d", g)
	}
}

func TestADiskIsGivenBackOnlyWhereItFits(t *testing.T) {
	for sentence, tc := range map[string]struct {
		base   string
		change func(*plan.Record)
		id     string
		refuse []string
	}{
		"to a VM that was not started yet":                                  {base: baseA},
		"to a VM that has pulled no image yet":                              {base: baseB, change: func(r *plan.Record) { r.Image, r.Disk = nil, nil }},
		"to a VM whose image was changed since, which its start will check": {base: baseB, change: func(r *plan.Record) { r.Spec.Image.Reference = "other" }},
		"not to a VM on another base: both digests are named, and the remedy": {
			base: baseB, refuse: []string{baseA, baseB, "set the VM's image"},
		},
		"not to a VM whose pinned image is another": {
			base: baseB, refuse: []string{baseA, baseB},
			change: func(r *plan.Record) { r.Image, r.Disk, r.Pin = nil, nil, &plan.Pin{Reference: "r", Digest: baseA} },
		},
		"not to a VM that runs": {
			base: baseA, refuse: []string{"is Starting", "desiredState: Stopped"},
			change: func(r *plan.Record) { r.Boot = &plan.Boot{Handle: &vmm.Handle{}} },
		},
		"not to a VM that waits for its next try": {
			base: baseA, refuse: []string{"is Pending", "desiredState: Stopped"},
			change: func(r *plan.Record) { r.LastExit = &machine.Exit{Verdict: machine.Failed} },
		},
		"not to a VM that is being removed": {
			base: baseA, refuse: []string{"is Removing"}, change: func(r *plan.Record) { r.Removal = &plan.Removal{} },
		},
		"not to a VM that is not here":             {base: baseA, id: "z", refuse: []string{"no VM z on this node", "desiredState: Stopped"}},
		"not of a base that nobody knows any more": {base: "", refuse: []string{"start the VM once"}, change: func(r *plan.Record) { r.Image, r.Disk = nil, nil }},
	} {
		t.Run(sentence, func(t *testing.T) {
			r := newTrashRig(t, tc.change)
			r.discard("lost", tc.base)
			if tc.id == "" {
				tc.id = "a"
			}
			err := r.engine.Restore(t.Context(), "a.1", tc.id)
			if len(tc.refuse) == 0 {
				if err != nil || r.disk() != "lost" || r.worker.recordNow().Disk.BaseDigest != tc.base {
					t.Fatalf("refused: %v", err)
				}
				return
			}
			if err == nil || len(r.trashed()) != 1 {
				t.Fatalf("it was given: %v", err)
			}
			for _, word := range tc.refuse {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not say %q", err, word)
				}
			}
		})
	}
}

func TestOnlyDisksOfTheTrashCanBeNamed(t *testing.T) {
	r := newTrashRig(t, nil)
	r.discard("lost", baseA)
	for _, name := range []string{"", "a.2", "../vm/a/private", "a.1.ext4", "/etc/passwd"} {
		if err := r.engine.Restore(t.Context(), name, "a"); !fault.Is(err, fault.NotFound) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestASizeThatNoRecordTellsIsThatOfTheFile(t *testing.T) {
	r := newTrashRig(t, nil)
	r.writeDisk("of a VM that nothing is known of")
	if err := r.engine.discard(r.engine.paths.private("a"), plan.Record{Spec: machine.Spec{ID: "u"}}, "w"); err != nil {
		t.Fatal(err)
	}
	if all, err := r.engine.Trash(t.Context()); err != nil || len(all) != 1 || all[0].GiB != 1 {
		t.Errorf("the trash tells %+v, %v", all, err)
	}
}
