package v1alpha1

// Names that users, the chart and all programs agree on. Those in docs/contract.md may not change.
const (
	// Namespace of the system's own objects.
	SystemNamespace = "imp-system"
	// LabelEnabled with value "true" marks a Node that takes VMs.
	LabelEnabled = "imp/enabled"
	// Finalizer keeps an ImpVM until its node has said that nothing of it is left.
	Finalizer = "imp.dev/node"
	// NetworkFinalizer keeps an ImpNetwork until no VM uses it.
	NetworkFinalizer = "imp.dev/network"
	// VNILeasePrefix + number is the claim of a VNI, a Lease in SystemNamespace held by an ImpNetwork's UID.
	VNILeasePrefix = "imp-vni-"
	// ClusterRangesName of the ConfigMap in SystemNamespace in which the operator tells agents what guests may not reach:
	// see package internal/clusterranges.
	ClusterRangesName = "imp-cluster-ranges"
	// LeasePrefix + node name is the agent's heartbeat in SystemNamespace, renewed every 10 s, stale after 40 s.
	LeasePrefix = "imp-agent-"
	// AnnotationRestartReset with a value that was not acted on before forgets a VM's failures, once for each value.
	AnnotationRestartReset = "imp.dev/restart-reset"
	// TaintEvacuate with effect NoExecute empties a node: VMs with mode reschedule move, in-place ones stop until it is gone, ephemeral
	// ones are left to end.
	TaintEvacuate = "imp.dev/evacuate"
	// AnnotationFakeScript drives the fake driver in tests: JSON of its Script.
	AnnotationFakeScript = "imp.dev/fake-script"

	// Field managers. One manager is one writer; each apply holds the complete set its manager owns.
	ManagerPlace     = "imp-place"
	ManagerNetwork   = "imp-network"
	ManagerReachable = "imp-reachable"
	ManagerAgent     = "imp-agent"
)

// Condition types of an ImpVM.
const (
	ConditionScheduled       = "Scheduled"
	ConditionDiskReady       = "DiskReady"
	ConditionNetworkReady    = "NetworkReady"
	ConditionStarted         = "Started"
	ConditionGuestReady      = "GuestReady"
	ConditionRestartRequired = "RestartRequired"
	ConditionFinished        = "Finished"
	ConditionNodeReachable   = "NodeReachable"
	ConditionReady           = "Ready"
)

// Condition and event reasons. Failure reasons are in internal/fault and spelled alike.
const (
	ReasonPlaced             = "Placed"
	ReasonNoNodeFits         = "NoNodeFits"
	ReasonInvalidSpec        = "InvalidSpec"
	ReasonDone               = "Done"      // a stage is passed
	ReasonPending            = "Pending"   // a stage has not been reached
	ReasonStarting           = "Starting"  // a stage is under way
	ReasonRunning            = "Running"   // Ready=True
	ReasonStopping           = "Stopping"  // being removed from its node
	ReasonCompleted          = "Completed" // Ready=False of a VM that Succeeded
	ReasonFailed             = "Failed"
	ReasonSucceeded          = "Succeeded"
	ReasonDeadlineExceeded   = "DeadlineExceeded"
	ReasonNodeLost           = "NodeLost"
	ReasonBackingOff         = "BackingOff"
	ReasonCrashLoopBackOff   = "CrashLoopBackOff"
	ReasonRetriesExhausted   = "RetriesExhausted" // waits for AnnotationRestartReset
	ReasonCoolingDown        = "CoolingDown"      // retries are used up; tried again by itself
	ReasonStopped            = "Stopped"          // desiredState
	ReasonEvacuated          = "Evacuated"        // stopped, or moved, for a taint of its node
	ReasonRescheduled        = "Rescheduled"      // taken back to be placed again
	ReasonDiskDiscarded      = "DiskDiscarded"    // the VM has moved; its disk has not
	ReasonProbeFailing       = "ProbeFailing"
	ReasonGuestSilent        = "GuestSilent"
	ReasonRuntimeTimeout     = "RuntimeTimeout"  // the node's runtime does not answer: what the guest does is not known
	ReasonStaleAssignment    = "StaleAssignment" // the node has a later assignment than the object
	ReasonAgentTimeout       = "AgentTimeout"
	ReasonReachable          = "Reachable"
	ReasonImagePullFailed    = "ImagePullFailed"
	ReasonNetworkSetupFailed = "NetworkSetupFailed"
	ReasonRuntimeStartFailed = "RuntimeStartFailed"
	ReasonRecovered          = "Recovered"
)
