"""Partitions: which rows of a store each client holds, the schemes that deal them, and the file that keeps them."""
