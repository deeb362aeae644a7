"""Measurements: the engine alone, the scheduler's core, what the cluster costs, and Tandem beside its peers."""

from cluster.event_loop import choose_poller

choose_poller()  # here, since gRPC reads it when it is imported
