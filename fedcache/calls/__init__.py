"""Implementation of the Python API; ``api`` holds the signatures and docstrings."""
