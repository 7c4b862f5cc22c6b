"""Trackers: hooks on the result stream that write it for TensorBoard, MLflow, Weights & Biases or trackio."""
