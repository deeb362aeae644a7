"""Waiting until a gateway serves a model."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.channel import connect


async def wait_serving(address: str, service: str) -> None:
    """Return once the health service at HOST:PORT reports `service` as SERVING; never gives up."""
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        attempt_pause_s = 0.05
        while True:
            try:
                async for response in stub.Watch(request):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(attempt_pause_s)
