"""Where a run's numbers are shown besides its own files: TensorBoard, Weights & Biases, MLflow."""
