"""Drafts by a model with another tokenizer than its target's; whatever goes wrong here costs drafts, never a token."""
