"""Training of the language model: `python -m nsa.train`.

A `TrainConfig` and the NSA_* flags come in; a step of the optimiser (`loop`, captured as a CUDA
graph by `graph`), logs and a learning curve (`progress`) go out. `data` and `documents` read what
is trained on; `ranks` starts the ranks of a node; `devices` chooses devices, and joins ranks.
"""
