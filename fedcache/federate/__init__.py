"""Federated learning on cached features: clients, rounds, methods."""
