"""The worker: runs the steps that the scheduler plans, on the weights and the KV memory of one device."""

from cluster.event_loop import choose_poller

choose_poller()  # here, since gRPC reads it when it is imported
