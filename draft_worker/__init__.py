"""The draft worker: guesses how sequences go on; what it says can only change speed, never a token."""

from cluster.event_loop import choose_poller

choose_poller()  # here, since gRPC reads it when it is imported
