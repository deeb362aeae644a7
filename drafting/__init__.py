"""How drafts are guessed: mirrors of the sequences that they are for, and proposers that lengthen them.

A draft worker does it for others, beside their steps (`draft_worker`); a worker can do it for itself, between its own
(`worker/own_drafts.py`).
"""
