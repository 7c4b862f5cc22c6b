"""What is done with uploads before they are aggregated: validation, attacks, robust rules, privacy."""
