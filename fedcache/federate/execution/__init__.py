"""Execution of a round's clients: one by one, as one batch, or in coordinates of their Gram matrices."""
