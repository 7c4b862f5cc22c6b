"""Heads: what is trained on top of frozen features, as pure functions over flat dicts of tensors.

Core axes come last (``[.., B, D]``), so one function serves one client, all clients and a grid of clients.
"""
