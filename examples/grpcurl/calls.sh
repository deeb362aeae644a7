#!/bin/sh
# Calls a Tandem cluster with grpcurl, which learns the API from the gateway itself: examples/grpcurl/calls.sh [HOST:PORT]
set -eu
target=${1:-127.0.0.1:50051}
api=tandem.v1.GenerationService

echo "# what there is"
grpcurl -plaintext "$target" list
grpcurl -plaintext "$target" describe $api.GenerateStream

echo "# whether it serves"
grpcurl -plaintext -d "{\"service\": \"$api\"}" "$target" grpc.health.v1.Health/Check

echo "# the whole answer at once"
grpcurl -plaintext -max-time 60 -d '{
  "text": "Once upon a time",
  "sampling": {"temperature": 0.7, "seed": "1"},
  "stop": {"max_tokens": 32, "ignore_eos": true}
}' "$target" $api/Generate

echo "# a conversation, token by token"
grpcurl -plaintext -max-time 60 -d '{
  "chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
  "sampling": {"temperature": 0},
  "stop": {"max_tokens": 32}
}' "$target" $api/GenerateStream

echo "# an error, with its details"
grpcurl -plaintext -format-error -d '{"text": "Once upon a time", "sampling": {"temperature": -1}}' \
  "$target" $api/Generate || echo "exit status $?: 64 + the gRPC code"
