package api

import (
	"fmt"
	"strings"
	"testing"

	"imp.dev/imp/api/v1alpha1"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestAnImpVMIsCheckedWhenItIsCreated(t *testing.T) {
	c := newCluster(t)
	const digest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	many := func(n int, format string) string {
		items := make([]string, n)
		for i := range items {
			items[i] = fmt.Sprintf(format, i)
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	for name, tc := range map[string]struct {
		spec string
		want []string
	}{
		"the image alone is enough": {spec: `{image: alpine}`},
		"an image may carry registry, port, path, tag and digest": {
			spec: `{image: "registry.example:5000/team/app_x/a-b.c:v1.2_3@sha256:` + digest + `"}`},
		"an image's registry may be an IPv6 address":  {spec: `{image: "[::1]:5000/a"}`},
		"no image is refused":                         {`{}`, []string{"spec.image: Required value"}},
		"an empty image is refused":                   {`{image: ""}`, []string{"spec.image", "must be an image reference, [REGISTRY[:PORT]/]REPOSITORY[:TAG][@sha256:DIGEST]"}},
		"an image with a blank is refused":            {`{image: "alpine latest"}`, []string{"spec.image", "must be an image reference"}},
		"an image in capitals is refused":             {`{image: "library/Alpine"}`, []string{"spec.image", "repository in lower case"}},
		"an image with a scheme is refused":           {`{image: "https://example.com/a"}`, []string{"spec.image", "must be an image reference"}},
		"an image with a short digest is refused":     {`{image: "alpine@sha256:abc"}`, []string{"spec.image", "must be an image reference"}},
		"an image of 2000 characters is refused":      {`{image: "` + strings.Repeat("a", 2000) + `"}`, []string{"spec.image", "Too long"}},
		"an unknown field is not a word of the API":   {`{image: a, imagePullPolicy: Sometimes}`, []string{"spec.imagePullPolicy", `"Always", "IfNotPresent", "Never"`}},
		"an unknown lifecycle is refused":             {`{image: a, lifecycle: forever}`, []string{"spec.lifecycle", `"ephemeral", "persistent"`}},
		"a pull secret without a name is refused":     {`{image: a, imagePullSecrets: [{}]}`, []string{"spec.imagePullSecrets", "name must not be empty"}},
		"a class's name is a name":                    {`{image: a, classRef: {name: "Big One"}}`, []string{"spec.classRef.name", "must be the name of an ImpVMClass"}},
		"a class reference without a name is refused": {`{image: a, classRef: {}}`, []string{"spec.classRef.name: Required value"}},

		"env takes any printable name":                {spec: `{image: a, env: [{name: "my.var-1 x", value: "a=b\n$(X) ü"}, {name: "my.var", value: ""}]}`},
		"env with = in its name is refused":           {`{image: a, env: [{name: "A=B"}]}`, []string{"spec.env[0].name", "printable ASCII characters other than '='"}},
		"env without a name is refused":               {`{image: a, env: [{name: ""}]}`, []string{"spec.env[0].name", "one or more printable ASCII"}},
		"env with a newline in its name is refused":   {`{image: a, env: [{name: "A\n"}]}`, []string{"spec.env[0].name", "printable ASCII"}},
		"env with the same name twice is refused":     {`{image: a, env: [{name: A, value: x}, {name: A, value: y}]}`, []string{"spec.env[1]", "Duplicate value"}},
		"env with a zero byte is refused":             {`{image: a, env: [{name: A, value: "x\0"}]}`, []string{"spec.env[0].value", "should match"}},
		"513 variables are refused":                   {`{image: a, env: ` + many(513, `{name: A%d}`) + `}`, []string{"spec.env", "must have at most 512 items"}},
		"arguments are taken as they are":             {spec: `{image: a, command: ["", "$X", "a\nb"], args: ["\"'", "ü"]}`},
		"an argument with a zero byte is refused":     {`{image: a, args: [a, "b\0c"]}`, []string{"spec.args[1]", "should match"}},
		"a command with a zero byte is refused":       {`{image: a, command: ["b\0c"]}`, []string{"spec.command[0]", "should match"}},
		"513 arguments are refused":                   {`{image: a, args: ` + many(513, `"%d"`) + `}`, []string{"spec.args", "must have at most 512 items"}},
		"an argument Linux would not pass is refused": {`{image: a, args: ["` + strings.Repeat("x", 131073) + `"]}`, []string{"spec.args[0]", "may not be more than 131072"}},

		"a relative workingDir is refused": {`{image: a, workingDir: srv}`, []string{"spec.workingDir", "must be an absolute path"}},
		"an empty workingDir is the image's": {
			spec: `{image: a, workingDir: ""}`},

		"dataPaths may be neighbours":                {spec: `{image: a, dataPaths: [/data, /data2, /var/lib/a b]}`},
		"a relative data path is refused":            {`{image: a, dataPaths: [data]}`, []string{"spec.dataPaths[0]", "must be an absolute path below '/'"}},
		"the root as data path is refused":           {`{image: a, dataPaths: [/]}`, []string{"spec.dataPaths[0]", "must be an absolute path below '/'"}},
		"a data path that climbs is refused":         {`{image: a, dataPaths: [/ok, /a/../b]}`, []string{"spec.dataPaths[1]", "without '.', '..'"}},
		"a data path that ends with .. is refused":   {`{image: a, dataPaths: [/a/..]}`, []string{"spec.dataPaths[0]", "without '.', '..'"}},
		"a data path with a dot is refused":          {`{image: a, dataPaths: [/a/./b]}`, []string{"spec.dataPaths[0]", "without '.', '..'"}},
		"a data path may have dots in a name":        {spec: `{image: a, dataPaths: [/a/..b/.c/d..]}`},
		"a data path that ends with / is refused":    {`{image: a, dataPaths: [/a/]}`, []string{"spec.dataPaths[0]", "a '/' at its end"}},
		"a data path with a newline is refused":      {`{image: a, dataPaths: ["/a\nb"]}`, []string{"spec.dataPaths[0]", "control characters"}},
		"a data path on /proc is refused":            {`{image: a, dataPaths: [/proc]}`, []string{"spec.dataPaths[0]", "must not be /proc, /sys, /dev, /run, /tmp"}},
		"a data path below /run is refused":          {`{image: a, dataPaths: [/run/postgres]}`, []string{"spec.dataPaths[0]", "or below one of them"}},
		"a data path that begins like /dev is taken": {spec: `{image: a, dataPaths: [/device]}`},
		"a data path below another is refused":       {`{image: a, dataPaths: [/a/b/c, /a]}`, []string{"spec.dataPaths", "must not hold a path that lies below another"}},
		"a data path twice is refused":               {`{image: a, dataPaths: [/a, /b, /a]}`, []string{"spec.dataPaths[2]", "Duplicate value"}},
		"33 data paths are refused":                  {`{image: a, dataPaths: ` + many(33, `/d%d`) + `}`, []string{"spec.dataPaths", "must have at most 32 items"}},

		"a node's name is a DNS name":              {`{image: a, nodeName: "Node 1"}`, []string{"spec.nodeName", "must be the name of a Node"}},
		"a selector takes labels":                  {spec: `{image: a, nodeSelector: {example.com/zone: a_1, disk: "", "x.y-z_1": "1.2"}}`},
		"a selector with a bad key is refused":     {`{image: a, nodeSelector: {"a b": c}}`, []string{"spec.nodeSelector", "keys must be label keys"}},
		"a selector with a bad value is refused":   {`{image: a, nodeSelector: {a: "b c"}}`, []string{"spec.nodeSelector", "values must be label values"}},
		"a selector with a long value is refused":  {`{image: a, nodeSelector: {a: ` + strings.Repeat("x", 64) + `}}`, []string{"spec.nodeSelector", "at most 63"}},
		"tolerations are a pod's":                  {spec: `{image: a, tolerations: [{operator: Exists}, {key: a/b, value: c}, {key: x, operator: Exists, effect: NoExecute}]}`},
		"an unknown operator is refused":           {`{image: a, tolerations: [{key: a, operator: In}]}`, []string{"spec.tolerations", "operator must be Exists or Equal"}},
		"an unknown effect is refused":             {`{image: a, tolerations: [{key: a, effect: Never}]}`, []string{"spec.tolerations", "effect must be NoSchedule, PreferNoSchedule, NoExecute"}},
		"no key with Equal is refused":             {`{image: a, tolerations: [{value: a}]}`, []string{"spec.tolerations", "operator must be Exists where key is empty"}},
		"a value with Exists is refused":           {`{image: a, tolerations: [{key: a, operator: Exists, value: b}]}`, []string{"spec.tolerations", "value must be empty where operator is Exists"}},
		"a toleration may last for some seconds":   {spec: `{image: a, tolerations: [{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 5}]}`},
		"seconds of another effect are refused":    {`{image: a, tolerations: [{key: a, operator: Exists, effect: NoSchedule, tolerationSeconds: 5}]}`, []string{"spec.tolerations", "effect must be NoExecute where tolerationSeconds is set"}},
		"seconds of every effect are refused":      {`{image: a, tolerations: [{key: a, operator: Exists, tolerationSeconds: 5}]}`, []string{"spec.tolerations", "effect must be NoExecute where tolerationSeconds is set"}},
		"a toleration with a bad key is refused":   {`{image: a, tolerations: [{key: "a b"}]}`, []string{"spec.tolerations", "key must be a label key"}},
		"a toleration with a bad value is refused": {`{image: a, tolerations: [{key: a, value: "b c"}]}`, []string{"spec.tolerations", "value must be a label value"}},
		"a network":                                 {spec: `{image: a, networkRef: {name: app-network}}`},
		"a network and an address in it":            {spec: `{image: a, networkRef: {name: app-network}, address: 10.44.0.10}`},
		"an empty address is none":                  {spec: `{image: a, address: ""}`},
		"a network's name is a name":                {`{image: a, networkRef: {name: "My Net"}}`, []string{"spec.networkRef.name", "must be the name of an ImpNetwork in the VM's namespace"}},
		"another namespace's network is refused":    {`{image: a, networkRef: {name: other/net}}`, []string{"spec.networkRef.name", "in the VM's namespace"}},
		"a network reference needs a name":          {`{image: a, networkRef: {}}`, []string{"spec.networkRef.name: Required value"}},
		"an empty name of a network is refused":     {`{image: a, networkRef: {name: ""}}`, []string{"spec.networkRef.name", "must be the name of an ImpNetwork"}},
		"an address without a network is refused":   {`{image: a, address: 10.44.0.10}`, []string{"spec.address", "is an address of a network: set networkRef too, or leave it out"}},
		"an address that is a name is refused":      {`{image: a, networkRef: {name: net}, address: web}`, []string{"spec.address", "must be an IPv4 address, like 10.44.0.10"}},
		"an address with its prefix is refused":     {`{image: a, networkRef: {name: net}, address: 10.44.0.1/2}`, []string{"spec.address", "must be an IPv4 address"}},
		"an IPv6 address is refused":                {`{image: a, networkRef: {name: net}, address: "fd00::10"}`, []string{"spec.address", "must be an IPv4 address"}},
		"leading zeros in an address are refused":   {`{image: a, networkRef: {name: net}, address: 10.44.0.010}`, []string{"spec.address", "must be an IPv4 address"}},
		"a negative grace is refused":               {`{image: a, terminationGracePeriodSeconds: -1}`, []string{"spec.terminationGracePeriodSeconds", "greater than or equal to 0"}},
		"a grace of 0 kills":                        {spec: `{image: a, terminationGracePeriodSeconds: 0}`},
		"a deadline of 0 is refused":                {`{image: a, activeDeadlineSeconds: 0}`, []string{"spec.activeDeadlineSeconds", "greater than or equal to 1"}},
		"a negative ttl is refused":                 {`{image: a, ttlSecondsAfterFinished: -1}`, []string{"spec.ttlSecondsAfterFinished", "greater than or equal to 0"}},
		"a ttl of 0 deletes at once":                {spec: `{image: a, ttlSecondsAfterFinished: 0}`},
		"a number in quotes is refused, with field": {`{image: a, activeDeadlineSeconds: "5"}`, []string{"spec.activeDeadlineSeconds", "must be of type integer"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.admin.Create(t.Context(), c.vm("checked", tc.spec), client.DryRunAll)
			refused(t, err, tc.want...)
		})
	}
}

func TestAnImpVMsNameIsAHostname(t *testing.T) {
	c := newCluster(t)
	const sentence = "metadata.name must be at most 63 lower-case letters, digits and '-'"
	for name, want := range map[string][]string{
		strings.Repeat("a", 63): nil,
		strings.Repeat("a", 64): {sentence},
		"a.b":                   {sentence},
		"1-a":                   nil,
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, c.admin.Create(t.Context(), c.vm(name, `{image: a}`), client.DryRunAll), want...)
		})
	}
}

func TestDefaultsOfAnImpVM(t *testing.T) {
	c := newCluster(t)
	vm := c.created("plain", `{image: a}`)
	if vm.Spec.Lifecycle != v1alpha1.LifecycleEphemeral {
		t.Errorf("lifecycle is %q, want ephemeral", vm.Spec.Lifecycle)
	}
	if g := vm.Spec.TerminationGracePeriodSeconds; g == nil || *g != 30 {
		t.Errorf("terminationGracePeriodSeconds is %v, want 30", g)
	}
	if vm.Spec.ImagePullPolicy != "" {
		t.Errorf("imagePullPolicy is %q; its default is the agent's to compute", vm.Spec.ImagePullPolicy)
	}
}

func TestAWordThatIsNotAFieldIsRefusedWhenKubectlAsksForIt(t *testing.T) {
	c := newCluster(t)
	err := client.WithFieldValidation(c.admin, "Strict").Create(t.Context(), c.vm("odd", `{image: a, netRef: {name: x}}`), client.DryRunAll)
	refused(t, err, `unknown field "spec.netRef"`)
}
