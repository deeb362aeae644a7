"""The worker: runs the steps that the scheduler plans, on the weights and the KV memory of one device."""
