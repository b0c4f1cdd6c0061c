"""First on the PYTHONPATH of a counted program; contains only `sitecustomize`."""
