"""Processing of uploads before they are aggregated: validation, attacks, robust rules, privacy."""
