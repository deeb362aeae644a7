"""Asks a service how it is, for container health checks: `python -m cluster.probe HOST:PORT [--service NAME] [--live]`.

    ready (unless told otherwise)    the named service says SERVING: it may be given work
    live (--live)                    the process answers at all, draining and waiting included: don't kill it

One line says what was found; the exit status is 0 (healthy), 1 (not) or 2 (wrong flags). Nothing heavy is imported,
since this runs every few seconds in every container.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


def ask(address: str, service: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """The state of a service of the process at HOST:PORT, as grpc.health.v1 names it.

    SERVICE_UNKNOWN for a name that it doesn't have. Raises grpc.RpcError where nobody answers in time.
    """
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return "SERVICE_UNKNOWN"
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(found.status)
    return state


def main() -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cluster.probe", description="Ask a service how it is.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="which one (default: the process as a whole)")
    parser.add_argument("--live", action="store_true", help="healthy means that the process answers, whatever it says")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help="default %(default)s")
    args = parser.parse_args()
    try:
        state = ask(args.address, args.service, args.timeout_s)
    except grpc.RpcError as error:
        print(f"{args.address}: {error.code().name}: {error.details()}")
        return 1
    print(f"{args.address}: {state}")
    return 0 if args.live or state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
