"""Tables: reads the columns of a file and finds out what each of them means, for every command that reads a table."""
