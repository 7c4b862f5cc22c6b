"""Partitions: the rows of a store that each client holds, the partition schemes, and the partition file."""
