"""Tables and figures of the papers as data, and the runner that compares them with measured numbers."""
