"""Heads: pure functions over flat dicts of tensors."""
