// Package v1alpha1 holds the Kubernetes types of the group imp.dev: the objects are the interface between a user, the
// operator and the agents, which never call each other.
//
// +kubebuilder:object:generate=true
// +groupName=imp.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of this package.
var GroupVersion = schema.GroupVersion{Group: "imp.dev", Version: "v1alpha1"}

// AddToScheme registers the types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&ImpVM{}, &ImpVMList{}, &ImpVMClass{}, &ImpVMClassList{}, &ImpNode{}, &ImpNodeList{},
		&ImpNetwork{}, &ImpNetworkList{}, &ImpAddress{}, &ImpAddressList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
