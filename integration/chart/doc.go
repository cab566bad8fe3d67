// Package chart tests what is deployed from deploy/helm and the container image, without Kubernetes and without an engine: the
// chart is rendered by both living majors of helm over a matrix of values (testdata/values), its objects are compared
// with the API's schemas, with what the programs take and answer, and with the last release; and the command lines
// that come out are started.
//
// testdata/schemas are the parts of Kubernetes' and the Prometheus operator's published schemas that the chart's kinds need.
// `go generate ./integration/chart` takes them anew from the versions that kubeschema names.
//
// testdata/released is what the last release rendered. After a release, `go test ./integration/chart -update` puts the
// present state there.
package chart

//go:generate go run ./kubeschema -out testdata/schemas
