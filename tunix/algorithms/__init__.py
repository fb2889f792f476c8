"""One folder per algorithm, with the same files in each: config.py, loss.py, algorithm.py, README.md."""
