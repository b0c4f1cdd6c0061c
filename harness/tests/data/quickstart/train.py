"""Train a small language model on the bytes of this file."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

arguments = argparse.ArgumentParser()
arguments.add_argument("--batch", type=int, default=8)
arguments.add_argument("--length", type=int, default=64)
arguments.add_argument("--steps", type=int, default=200)
args = arguments.parse_args()

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
text = torch.tensor(list(Path(__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(1, args.steps + 1):
    starts = torch.randint(len(text) - args.length - 1, (args.batch,))
    rows = torch.stack([text[s : s + args.length + 1] for s in starts])
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    print(f"step {step} loss {loss.item():.4f}")
