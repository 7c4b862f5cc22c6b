"""Every table and figure of the papers as data, and the runner that puts numbers got here beside the printed ones."""
