package chart

import "strings"

// pod is what Kubernetes would tell a pod of itself.
type pod struct{ name, node, zone, ip string }

// args is the command line of a container in the pod, with its variables replaced as Kubernetes does.
func (p *pod) args(c *container) []string {
	var pairs []string
	for _, e := range c.Env {
		value := e.Value
		switch e.ValueFrom.FieldRef.FieldPath {
		case "metadata.name":
			value = p.name
		case "status.podIP":
			value = p.ip
		case "spec.nodeName":
			value = p.node
		case "metadata.labels['topology.kubernetes.io/zone']":
			value = p.zone
		}
		pairs = append(pairs, "$("+e.Name+")", value)
	}
	replace := strings.NewReplacer(pairs...)
	args := make([]string, len(c.Args))
	for i, a := range c.Args {
		args[i] = replace.Replace(a)
	}
	return args
}
