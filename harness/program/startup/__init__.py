"""Put first on the PYTHONPATH of a program that is counted: `sitecustomize`, and nothing else."""
