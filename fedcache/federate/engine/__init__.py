"""The engine: the contract of a method, what its functions are given, the state of a run, and its rounds."""
