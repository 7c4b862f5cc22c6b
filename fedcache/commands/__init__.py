"""The commands: parse, one library call, print."""
