"""Partitions: which rows of a store each client holds, the schemes that assign them, and the file that keeps them."""
