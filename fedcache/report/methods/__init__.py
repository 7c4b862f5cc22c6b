"""Description of a method: its switches, its messages, and its page in the documentation."""
