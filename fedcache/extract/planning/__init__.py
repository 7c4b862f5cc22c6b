"""What an extraction will do before it does it: which store, what is missing, what is taken over, what it costs."""
