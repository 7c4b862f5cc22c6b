"""The stores of a home: found by name, and what in and among them can go."""
