"""Objects as another process gets them."""

import pickle


def sent(held):
    """``held`` as it comes out of its pickle."""
    return pickle.loads(pickle.dumps(held))
