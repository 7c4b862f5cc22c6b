"""What there is to say about a method: its switches, what travels, and its page in the documentation."""
