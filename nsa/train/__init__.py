"""Training of the language model: `python -m nsa.train`.

A `TrainConfig` and the NSA_* flags come in; a step of the optimiser (`loop`, captured as a CUDA
graph by `graph`), logs and a learning curve (`progress`) go out. `data` and `documents` read what
is trained on; `devices` chooses the device and joins processes.
"""
