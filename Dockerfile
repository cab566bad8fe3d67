# syntax=docker/dockerfile:1
# The programs, etcd with its tools, and nothing else: no shell, no libraries, no root. `make image` builds it.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
RUN make image-programs VERSION=${VERSION}
# Where a bookie's volume is mounted: a volume that is new takes over whose it is.
RUN mkdir -p /empty

FROM scratch
COPY --from=build /src/bin/broker /src/bin/bookie /src/bin/penstock /src/bin/etcd /src/bin/etcdctl /src/bin/etcdutl /usr/bin/
COPY --from=build --chown=10001:10001 /empty /var/lib/penstock
ENV PATH=/usr/bin
USER 10001:10001
CMD ["/usr/bin/penstock", "--help"]
