#!/bin/sh
# Makes the stubs, tandemv1/*.pb.go, from the protos. Needs protoc and its two plugins for Go:
#
#   go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.5
#   go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0
set -eu
cd "$(dirname "$0")"
package=tandem-go-example/tandemv1
set -- --proto_path=../../protos
for name in types generation; do
  set -- "$@" "--go_opt=Mtandem/v1/$name.proto=$package" "--go-grpc_opt=Mtandem/v1/$name.proto=$package"
done
mkdir -p tandemv1
protoc "$@" --go_out=tandemv1 --go_opt=module=$package --go-grpc_out=tandemv1 --go-grpc_opt=module=$package \
  tandem/v1/types.proto tandem/v1/generation.proto
