"""The child side: the forkserver takes an Order and forks a worker, which measures one case (or
checks cases, describes its environment, tests its clocks) and sends messages back. The parent
imports nothing from here.
"""
