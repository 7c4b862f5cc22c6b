"""What a user means, as functions: default rules, store look-up, and the only modules that import both sides."""
