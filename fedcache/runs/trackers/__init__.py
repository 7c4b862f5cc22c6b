"""Trackers: hooks that write the rounds of runs for TensorBoard, MLflow, Weights & Biases or trackio."""
