package rpc

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	runtimev1 "imp.dev/imp/api/runtime/v1"
	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image"
	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/network"
	"imp.dev/imp/internal/restart"
)

func specToWire(s machine.Spec) *runtimev1.Spec {
	return &runtimev1.Spec{
		Id: s.ID, Namespace: s.Namespace, Name: s.Name, Assignment: s.Assignment, Generation: s.Generation,
		Lifecycle: string(s.Lifecycle), Image: imageToWire(s.Image), Vcpu: int64(s.VCPU), MemoryMib: s.MemoryMiB, DiskGib: s.DiskGiB,
		Workload: workloadToWire(s.Workload), Interfaces: mapSlice(s.Interfaces, interfaceToWire), Probe: probeToWire(s.Probe),
		Grace: duration(s.Grace), Deadline: timestamp(s.Deadline), Restart: policyToWire(s.Restart), History: historyToWire(s.History), Script: s.Script,
		Reset_: s.Reset, Halt: haltToWire(s.Halt), Cluster: s.Cluster,
	}
}

func specFromWire(s *runtimev1.Spec) machine.Spec {
	return machine.Spec{
		ID: s.GetId(), Namespace: s.GetNamespace(), Name: s.GetName(), Assignment: s.GetAssignment(), Generation: s.GetGeneration(),
		Lifecycle: machine.Lifecycle(s.GetLifecycle()), Image: imageFromWire(s.GetImage()), VCPU: int(s.GetVcpu()), MemoryMiB: s.GetMemoryMib(),
		DiskGiB: s.GetDiskGib(), Workload: workloadFromWire(s.GetWorkload()), Interfaces: mapSlice(s.GetInterfaces(), interfaceFromWire),
		Probe: probeFromWire(s.GetProbe()), Grace: s.GetGrace().AsDuration(), Deadline: instant(s.GetDeadline()),
		Restart: policyFromWire(s.GetRestart()), History: historyFromWire(s.GetHistory()), Script: s.GetScript(),
		Reset: s.GetReset_(), Halt: haltFromWire(s.GetHalt()), Cluster: s.GetCluster(),
	}
}

func imageToWire(i machine.Image) *runtimev1.Image {
	return &runtimev1.Image{
		Reference: i.Reference, Policy: string(i.Policy), Digest: i.Digest, NeedsCredentials: i.NeedsCredentials,
		Credentials: mapSlice(i.Credentials, func(c image.Credential) *runtimev1.Credential {
			return &runtimev1.Credential{
				Registry: c.Registry, Username: []byte(c.Username), Password: []byte(c.Password),
				IdentityToken: []byte(c.IdentityToken), RegistryToken: []byte(c.RegistryToken),
			}
		}),
	}
}

func imageFromWire(i *runtimev1.Image) machine.Image {
	return machine.Image{
		Reference: i.GetReference(), Policy: image.PullPolicy(i.GetPolicy()), Digest: i.GetDigest(), NeedsCredentials: i.GetNeedsCredentials(),
		Credentials: mapSlice(i.GetCredentials(), func(c *runtimev1.Credential) image.Credential {
			return image.Credential{
				Registry: c.GetRegistry(), Username: string(c.GetUsername()), Password: string(c.GetPassword()),
				IdentityToken: string(c.GetIdentityToken()), RegistryToken: string(c.GetRegistryToken()),
			}
		}),
	}
}

func workloadToWire(w machine.Workload) *runtimev1.Workload {
	return &runtimev1.Workload{
		Command: mapSlice(w.Command, toBytes), Args: mapSlice(w.Args, toBytes), WorkingDir: []byte(w.WorkingDir), DataPaths: mapSlice(w.DataPaths, toBytes),
		Env: mapSlice(w.Env, func(v machine.EnvVar) *runtimev1.EnvVar {
			return &runtimev1.EnvVar{Name: []byte(v.Name), Value: []byte(v.Value)}
		}),
	}
}

func workloadFromWire(w *runtimev1.Workload) machine.Workload {
	return machine.Workload{
		Command: mapSlice(w.GetCommand(), toString), Args: mapSlice(w.GetArgs(), toString), WorkingDir: string(w.GetWorkingDir()),
		DataPaths: mapSlice(w.GetDataPaths(), toString),
		Env: mapSlice(w.GetEnv(), func(v *runtimev1.EnvVar) machine.EnvVar {
			return machine.EnvVar{Name: string(v.GetName()), Value: string(v.GetValue())}
		}),
	}
}

func interfaceToWire(n network.Interface) *runtimev1.Interface {
	return &runtimev1.Interface{
		Name: n.Name, Network: n.Network, Mac: n.MAC, Addresses: n.Addresses, Gateway: n.Gateway, Mtu: int64(n.MTU), Nameservers: n.Nameservers,
		SearchDomains: n.SearchDomains,
	}
}

func interfaceFromWire(n *runtimev1.Interface) network.Interface {
	return network.Interface{
		Name: n.GetName(), Network: n.GetNetwork(), MAC: n.GetMac(), Addresses: n.GetAddresses(), Gateway: n.GetGateway(), MTU: int(n.GetMtu()),
		Nameservers: n.GetNameservers(), SearchDomains: n.GetSearchDomains(),
	}
}

func probeToWire(p *machine.Probe) *runtimev1.Probe {
	if p == nil {
		return nil
	}
	return &runtimev1.Probe{
		Path: p.Path, Port: int64(p.Port), Period: duration(p.Period), Timeout: duration(p.Timeout), FailureThreshold: int64(p.FailureThreshold),
	}
}

func probeFromWire(p *runtimev1.Probe) *machine.Probe {
	if p == nil {
		return nil
	}
	return &machine.Probe{
		Path: p.GetPath(), Port: int(p.GetPort()), Period: p.GetPeriod().AsDuration(), Timeout: p.GetTimeout().AsDuration(),
		FailureThreshold: int(p.GetFailureThreshold()),
	}
}

func policyToWire(p restart.Policy) *runtimev1.RestartPolicy {
	return &runtimev1.RestartPolicy{
		MaxRetries: p.MaxRetries, InitialDelay: duration(p.InitialDelay), MaxDelay: duration(p.MaxDelay),
		Mode: string(p.Mode), OnExhaustion: string(p.OnExhaustion), CoolDown: duration(p.CoolDown),
	}
}

func policyFromWire(p *runtimev1.RestartPolicy) restart.Policy {
	if p == nil {
		return restart.Policy{}
	}
	return restart.Policy{
		MaxRetries: p.MaxRetries, InitialDelay: p.GetInitialDelay().AsDuration(), MaxDelay: p.GetMaxDelay().AsDuration(),
		Mode: restart.Mode(p.GetMode()), OnExhaustion: restart.OnExhaustion(p.GetOnExhaustion()), CoolDown: p.GetCoolDown().AsDuration(),
	}
}

func historyToWire(h restart.History) *runtimev1.RestartHistory {
	return &runtimev1.RestartHistory{
		Attempts: h.Attempts, StartFailures: h.StartFailures, LastFailureAt: timestamp(h.LastFailureAt),
		NextTryAt: timestamp(h.NextTryAt), ExhaustedAt: timestamp(h.ExhaustedAt), Elsewhere: h.Elsewhere, Reset_: h.Reset,
	}
}

func historyFromWire(h *runtimev1.RestartHistory) restart.History {
	return restart.History{
		Attempts: h.GetAttempts(), StartFailures: h.GetStartFailures(), LastFailureAt: instant(h.GetLastFailureAt()),
		NextTryAt: instant(h.GetNextTryAt()), ExhaustedAt: instant(h.GetExhaustedAt()), Elsewhere: h.GetElsewhere(), Reset: h.GetReset_(),
	}
}

func haltToWire(h *machine.Halt) *runtimev1.Halt {
	if h == nil {
		return nil
	}
	return &runtimev1.Halt{Reason: string(h.Reason), Message: []byte(h.Message)}
}

func haltFromWire(h *runtimev1.Halt) *machine.Halt {
	if h == nil {
		return nil
	}
	return &machine.Halt{Reason: fault.Reason(h.GetReason()), Message: string(h.GetMessage())}
}

func toBytes(s string) []byte  { return []byte(s) }
func toString(b []byte) string { return string(b) }

// mapSlice keeps nil for empty: on the wire the two are one.
func mapSlice[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, v := range in {
		out[i] = f(v)
	}
	return out
}

func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}

func instant(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	v := t.AsTime()
	return &v
}

func timestampValue(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func instantValue(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
