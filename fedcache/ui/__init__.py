"""A page of the home for a browser on this machine: stores, runs and grids as they are, read and never changed."""
