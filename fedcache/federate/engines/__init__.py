"""Engines for more than one machine; optional extras, imported only when requested."""
