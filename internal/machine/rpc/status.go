package rpc

import (
	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
)

func statusToWire(s machine.Status) *runtimev1.Status {
	return &runtimev1.Status{
		Id: s.ID, Namespace: s.Namespace, Name: s.Name, Assignment: s.Assignment, Revision: s.Revision, Generation: s.Generation,
		State: string(s.State), Incarnation: s.Incarnation, Run: s.Run, Disk: checkToWire(s.Disk), Network: checkToWire(s.Network),
		Started: checkToWire(s.Started), GuestReady: checkToWire(s.GuestReady), RestartRequired: s.RestartRequired,
		Final: exitToWire(s.Final), LastExit: exitToWire(s.LastExit), History: historyToWire(s.History),
		StartedAt: timestamp(s.StartedAt), FinishedAt: timestamp(s.FinishedAt), ImageDigest: s.ImageDigest, DiskGeneration: s.DiskGeneration,
		Timings: timingsToWire(s.Timings), Progress: []byte(s.Progress),
		Counters: countersToWire(s.Counters), LastFailure: failureToWire(s.LastFailure), Cluster: s.Cluster,
	}
}

func statusFromWire(s *runtimev1.Status) machine.Status {
	return machine.Status{
		ID: s.GetId(), Namespace: s.GetNamespace(), Name: s.GetName(), Assignment: s.GetAssignment(), Revision: s.GetRevision(),
		Generation: s.GetGeneration(), State: machine.State(s.GetState()), Incarnation: s.GetIncarnation(), Run: s.GetRun(),
		Disk: checkFromWire(s.GetDisk()), Network: checkFromWire(s.GetNetwork()), Started: checkFromWire(s.GetStarted()),
		GuestReady: checkFromWire(s.GetGuestReady()), RestartRequired: s.GetRestartRequired(),
		Final: exitFromWire(s.GetFinal()), LastExit: exitFromWire(s.GetLastExit()), History: historyFromWire(s.GetHistory()),
		StartedAt: instant(s.GetStartedAt()), FinishedAt: instant(s.GetFinishedAt()), ImageDigest: s.GetImageDigest(), DiskGeneration: s.GetDiskGeneration(),
		Timings: timingsFromWire(s.GetTimings()), Progress: string(s.GetProgress()),
		Counters: countersFromWire(s.GetCounters()), LastFailure: failureFromWire(s.GetLastFailure()), Cluster: s.GetCluster(),
	}
}

func countersToWire(c machine.Counters) *runtimev1.Counters {
	w := &runtimev1.Counters{Starts: c.Starts, Exits: c.Exits, Restarts: c.Restarts, Adopted: c.Adopted, Retries: c.Retries, Silent: c.Silent}
	for verdict, n := range c.Ends {
		if w.Ends == nil {
			w.Ends = map[string]int64{}
		}
		w.Ends[string(verdict)] = n
	}
	return w
}

func countersFromWire(w *runtimev1.Counters) machine.Counters {
	c := machine.Counters{
		Starts: w.GetStarts(), Exits: w.GetExits(), Restarts: w.GetRestarts(), Adopted: w.GetAdopted(), Retries: w.GetRetries(), Silent: w.GetSilent(),
	}
	for verdict, n := range w.GetEnds() {
		if c.Ends == nil {
			c.Ends = map[machine.Verdict]int64{}
		}
		c.Ends[machine.Verdict(verdict)] = n
	}
	return c
}

func failureToWire(f *machine.Failure) *runtimev1.Failure {
	if f == nil {
		return nil
	}
	return &runtimev1.Failure{
		Reason: string(f.Reason), Message: []byte(f.Message), At: timestampValue(f.At), Incarnation: f.Incarnation, Code: f.Code, ConsoleTail: f.ConsoleTail,
	}
}

func failureFromWire(f *runtimev1.Failure) *machine.Failure {
	if f == nil {
		return nil
	}
	return &machine.Failure{
		Reason: fault.Reason(f.GetReason()), Message: string(f.GetMessage()), At: instantValue(f.GetAt()), Incarnation: f.GetIncarnation(), Code: f.Code,
		ConsoleTail: f.GetConsoleTail(),
	}
}

func checkToWire(c machine.Check) *runtimev1.Check {
	return &runtimev1.Check{Ok: c.OK, Reason: string(c.Reason), Message: []byte(c.Message), Since: timestampValue(c.Since)}
}

func checkFromWire(c *runtimev1.Check) machine.Check {
	if c == nil {
		return machine.Check{}
	}
	return machine.Check{OK: c.Ok, Reason: fault.Reason(c.GetReason()), Message: string(c.GetMessage()), Since: instantValue(c.GetSince())}
}

func exitToWire(e *machine.Exit) *runtimev1.Exit {
	if e == nil {
		return nil
	}
	return &runtimev1.Exit{
		Incarnation: e.Incarnation, Run: e.Run, Verdict: string(e.Verdict), At: timestampValue(e.At), Code: e.Code,
		Message: []byte(e.Message), ConsoleTail: e.ConsoleTail, Marker: e.Marker,
	}
}

func exitFromWire(e *runtimev1.Exit) *machine.Exit {
	if e == nil {
		return nil
	}
	return &machine.Exit{
		Incarnation: e.GetIncarnation(), Run: e.GetRun(), Verdict: machine.Verdict(e.GetVerdict()), At: instantValue(e.GetAt()), Code: e.Code,
		Message: string(e.GetMessage()), ConsoleTail: e.GetConsoleTail(), Marker: e.GetMarker(),
	}
}

func timingsToWire(t machine.Timings) *runtimev1.Timings {
	return &runtimev1.Timings{
		Pull: duration(t.Pull), Disk: duration(t.Disk), Network: duration(t.Network), Vmm: duration(t.VMM),
		Kernel: duration(t.Kernel), Guest: duration(t.Guest), Workload: duration(t.Workload),
	}
}

func timingsFromWire(t *runtimev1.Timings) machine.Timings {
	return machine.Timings{
		Pull: t.GetPull().AsDuration(), Disk: t.GetDisk().AsDuration(), Network: t.GetNetwork().AsDuration(), VMM: t.GetVmm().AsDuration(),
		Kernel: t.GetKernel().AsDuration(), Guest: t.GetGuest().AsDuration(), Workload: t.GetWorkload().AsDuration(),
	}
}

func infoToWire(i machine.Info) *runtimev1.InfoResponse {
	return &runtimev1.InfoResponse{
		Version: i.Version, Instance: i.Instance, BootId: i.BootID, Features: i.Features, Driver: i.Driver, Usable: i.Usable, Problem: i.Problem,
		VmmVersion: i.VMMVersion, Accelerator: i.Accelerator, KernelDigest: i.KernelDigest, CgroupVersion: i.CgroupVersion, Architecture: i.Architecture,
		BudgetVcpu: i.BudgetVCPU, BudgetMemoryMib: i.BudgetMemoryMiB, BudgetDiskGib: i.BudgetDiskGiB, OverheadMib: i.OverheadMiB,
		ImageCache: &runtimev1.ImageCache{
			Bytes: i.ImageCache.Bytes, Budget: i.ImageCache.Budget, Bases: int64(i.ImageCache.Bases), InUse: int64(i.ImageCache.InUse),
		},
		Network: hostToWire(i.Network),
	}
}

func infoFromWire(i *runtimev1.InfoResponse) machine.Info {
	c := i.GetImageCache()
	return machine.Info{
		Version: i.GetVersion(), Instance: i.GetInstance(), BootID: i.GetBootId(), Features: i.GetFeatures(), Driver: i.GetDriver(),
		Usable: i.GetUsable(), Problem: i.GetProblem(), VMMVersion: i.GetVmmVersion(), Accelerator: i.GetAccelerator(),
		KernelDigest: i.GetKernelDigest(), CgroupVersion: i.GetCgroupVersion(), Architecture: i.GetArchitecture(),
		BudgetVCPU: i.GetBudgetVcpu(), BudgetMemoryMiB: i.GetBudgetMemoryMib(), BudgetDiskGiB: i.GetBudgetDiskGib(), OverheadMiB: i.GetOverheadMib(),
		ImageCache: image.Usage{Bytes: c.GetBytes(), Budget: c.GetBudget(), Bases: int(c.GetBases()), InUse: int(c.GetInUse())},
		Network:    hostFromWire(i.GetNetwork()),
	}
}
