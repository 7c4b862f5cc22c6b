"""Tables: the columns of a file, and what each of them means, for every command that reads one."""
