"""Curves of jobs mirrored to TensorBoard, MLflow or Weights & Biases."""
