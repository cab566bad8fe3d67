# Penstock's build. Everything needs only Go and make. `make help` lists the targets.
SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export CGO_ENABLED ?= 0
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS   := -X main.version=$(VERSION)
TOOLBIN   := $(CURDIR)/bin/tools
PROGRAMS  := broker bookie penstock
# Tests that mount volumes, make network namespaces and attach to processes need root and these programs.
NOROOT     = $(shell missing=; for t in mkfs.ext4 mkfs.xfs ip strace; do command -v $$t >/dev/null || missing=yes; done; \
	[ "$$(id -u)" = 0 ] && [ -z "$$missing" ] || echo -tags noroot)

##@ Use

.PHONY: help
help: ## list the targets
	@awk 'BEGIN{FS=":.*## "} /^##@/{printf "\n%s\n", substr($$0,5)} /^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## messages survive the death of their broker and of a bookie
	bin/penstock demo

.PHONY: run
run: build ## a standalone cluster in this terminal, data in ./penstock-data
	bin/penstock standalone

##@ Build

.PHONY: build
build: programs bin/etcd ## bin/broker, bin/bookie, bin/penstock, bin/etcd

.PHONY: programs
programs: ## the first three of them
	go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ $(PROGRAMS:%=./cmd/%)

bin/etcd: tools/go.mod
	cd tools && go build -trimpath -o ../bin/etcd go.etcd.io/etcd/server/v3

bin/etcdctl bin/etcdutl: tools/go.mod
	cd tools && go build -trimpath -o ../$@ go.etcd.io/etcd/$(@F)/v3

.PHONY: image-programs
image-programs: programs bin/etcd bin/etcdctl bin/etcdutl ## what an image has

bin/nats-server: tools/go.mod
	cd tools && go build -trimpath -o ../bin/nats-server github.com/nats-io/nats-server/v2

# Without its pages for browsers and the clouds' ways to find targets it builds in a third of the time.
bin/prometheus bin/promtool: tools/prometheus/go.mod
	cd tools/prometheus && go build -trimpath -tags remove_all_sd,netgo -o ../../$@ github.com/prometheus/prometheus/cmd/$(@F)

.PHONY: image
image: ## a container image of them, IMAGE by name, with ENGINE (docker)
	$(or $(ENGINE),docker) build --build-arg VERSION=$(VERSION) -t $(or $(IMAGE),localhost/penstock:0.1.0) .

.PHONY: generate
generate: tools ## generated Go from api/*.proto
	PATH="$(TOOLBIN):$$PATH" buf generate

.PHONY: dashboards
dashboards: ## Grafana's dashboards and Prometheus' rules, from tools/dashboards
	cd tools/dashboards && go run .

.PHONY: clean
clean: ## what was built
	rm -rf bin

##@ Check

.PHONY: test
test: build bin/nats-server bin/prometheus bin/promtool chart-tools ## every test but the long runs, with the race detector
	CGO_ENABLED=1 go test -race -timeout 20m ./api/... ./cmd/... ./pkg/...
	go test -timeout 20m -run AtEach ./pkg/ledgerstore
	cd tools/dashboards && go test -count=1 ./...
	@[ -z "$(NOROOT)" ] || echo "without the tests of disks and networks, which need root, mkfs.ext4, mkfs.xfs, ip and strace"
	CGO_ENABLED=1 go test -race -count=1 -timeout 20m $(NOROOT) ./integration/...

.PHONY: test-powercut
test-powercut: build ## hundreds of power cuts on ext4 and XFS, into docs/results; needs root
	go test -count=1 -timeout 40m ./integration/powercut -version $(VERSION) -cuts $(or $(CUTS),300) -results $(CURDIR)/docs/results/power-cuts.md
	go test -count=1 -timeout 40m ./integration -run 'TestPowerCut$$' -powercuts $(or $(BOOKIE_CUTS),36) -powercuts.results $(CURDIR)/docs/results/power-cuts-bookies.md

.PHONY: test-faults
test-faults: build ## every fault against every workload, CELL a cell, into docs/results; needs root, strace, an hour
	nice go test -count=1 -timeout 4h ./integration/faults -run Matrix -full -for $(or $(CELL),60s) -results $(CURDIR)/docs/results/faults.md
	go test -count=1 -timeout 2h ./integration -run 'TestDecommissionUnderFaults$$' -decommissions $(or $(DECOMMISSIONS),20)

.PHONY: check
check: tools ## linters, buf lint, generated code and go.mod up to date
	"$(TOOLBIN)/golangci-lint" run --allow-parallel-runners ./...
	PATH="$(TOOLBIN):$$PATH" buf lint
	@before=$$(mktemp -d); trap 'rm -rf "$$before"' EXIT; cp -r api "$$before/"; \
	PATH="$(TOOLBIN):$$PATH" buf generate; \
	diff -r "$$before/api" api || { echo "generated code is out of date: run make generate and commit" >&2; exit 1; }
	go mod tidy -diff
	cd tools && go mod tidy -diff
	cd tools/chart && go mod tidy -diff
	cd tools/prometheus && go mod tidy -diff
	cd tools/dashboards && go mod tidy -diff && go vet ./...

.PHONY: bench
bench: ## Go benchmarks of the data path, with allocations
	go test -run '^$$' -bench . -benchmem $(BENCHFLAGS) ./pkg/...

.PHONY: bench-failover
bench-failover: build ## gaps of KILLS (100) kills and stops of each kind, into docs/results; 25 minutes
	go test -count=1 -timeout 90m ./integration/failover -run Strikes -kills $(or $(KILLS),100) -results $(CURDIR)/docs/results/failover.md

.PHONY: bench-scale
bench-scale: build ## what TOPICS (10000) used and IDLE (100000) unused topics cost, into docs/results; 10 to 15 minutes
	go test -count=1 -timeout 60m ./integration/scale -run Scale -topics $(or $(TOPICS),10000) -idle $(or $(IDLE),100000) -results $(CURDIR)/docs/results/scale.md

.PHONY: bench-peers
bench-peers: build bin/nats-server ## Penstock beside JetStream and the bare disk, ROUNDS=5, into docs/results; a quarter of an hour
	go run -ldflags '-X main.commit=$(VERSION)' ./integration/peers -rounds $(or $(ROUNDS),5) -out docs/results/bench.md

.PHONY: tools
tools: $(TOOLBIN)/.stamp

$(TOOLBIN)/.stamp: tools/go.mod
	mkdir -p $(TOOLBIN)
	cd tools && GOBIN="$(TOOLBIN)" go install tool
	touch $@

.PHONY: chart-tools
chart-tools: bin/chart/.stamp ## helm 3, helm 4 and kubeconform, for the tests of the chart

bin/chart/.stamp: tools/chart/go.mod
	mkdir -p bin/chart
	cd tools/chart && go build -trimpath -o ../../bin/chart/helm3 helm.sh/helm/v3/cmd/helm
	cd tools/chart && go build -trimpath -o ../../bin/chart/helm4 helm.sh/helm/v4/cmd/helm
	cd tools/chart && go build -trimpath -o ../../bin/chart/ github.com/yannh/kubeconform/cmd/kubeconform
	touch $@
