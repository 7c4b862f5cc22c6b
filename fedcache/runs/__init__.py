"""The life of a run: its specification, preparation, loop, events, identity, directory and results."""
