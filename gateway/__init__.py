"""Faces clients: text and tokens, limits, live requests, and the one session with the scheduler."""

from cluster.event_loop import choose_poller

choose_poller()  # here, since gRPC reads it when it is imported
