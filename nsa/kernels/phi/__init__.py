"""The MLP phi, which turns each block of keys or values into one compressed token.

Keys or values and the weights of phi come in; compressed tokens go out (`forward`). `backward` and
`weights` compute the gradients, and `rows` addresses the tokens of a block.
"""
