"""What the functions of the Python API do with their arguments; ``api`` holds their signatures and docstrings."""
