"""The commands of the command line. Each parses its options, calls the library once and prints the answer."""
