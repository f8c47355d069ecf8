"""What `lmstorfs run` loads into a training script that knows nothing of us."""
