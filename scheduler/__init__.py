"""Decides what runs where: the queue, the workers' blocks, steps; and the streams of gateways and workers."""

from cluster.event_loop import choose_poller

choose_poller()  # here, since gRPC reads it when it is imported
