"""The layer and a byte-level language model around it, with the caches to decode.

Token features or bytes come in; outputs or logits go out. `attention` is the layer, NSA or dense;
`language_model` the model; `cache` and `device_cache` hold keys and values for `decoding`; `rotary`
turns heads by position; `compiled` runs parts through `torch.compile`.
"""
