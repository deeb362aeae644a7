"""The scheduler's mind: pure decisions, no clock, no I/O, no randomness. Time comes in as an argument."""
