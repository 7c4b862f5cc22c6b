"""How the clients of a round are computed: one by one, as one batch, or in coordinates of their Gram matrices."""
