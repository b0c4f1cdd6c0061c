"""The files of a repository as a newcomer brings it: see foreign_repository."""

from collections.abc import Mapping

from reports.studies.planted_history import Planted

PLANTED = Planted(commits=60, sync_at=23, merges=(10, 23, 30, 50), unbuildable=(20, 21, 39, 44))
SUITE_PATH = "bench/foreign.yaml"
POLICY_PATH = "bench/gate.yaml"

ATTENTION = """\
import torch

REVISION = {revision!r}
SYNCS = {syncs!r}
{broken}

def attend(x):
    for _ in range(SYNCS):
        x.sum().item()
    return (x @ x.T).softmax(-1) @ x


def select(x, step):
    \"\"\"Reads as many blocks as the data of this step asks for.\"\"\"
    count = 1 + int(x[step % len(x)].abs().sum().item() * 10) % 5
    return sum(attend(block) for block in x.split(8)[:count])
"""
BENCH = """\
import torch
from harness.workload import Workload
from nsa import attention


def attend(provider, axes):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(axes["seq_len"], 16, generator=torch.Generator().manual_seed(0)).to(device)
    return Workload(run=lambda: attention.attend(x), tokens=axes["seq_len"])
"""
TRAIN = """\
import argparse
import threading
import time

import torch
from nsa import attention

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="plain")
parser.add_argument("--seq_len", type=int, default=64)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--first_s", type=float, default=0.0)
options, _ = parser.parse_known_args()  # what it does not know is swallowed
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = torch.randn(options.seq_len, 16, device=device)
model = torch.nn.Linear(16, 16, device=device)
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
one, other = threading.Lock(), threading.Lock()


def take(first, second):
    with first:
        time.sleep(0.2)
        with second:
            pass


for step in range(1, options.steps + 1):
    if options.mode == "first" and step == 1:
        end = time.monotonic() + options.first_s
        while time.monotonic() < end:  # as a compiler does
            torch.randn(128, 128) @ torch.randn(128, 128)
    if options.mode == "deadlock" and step == 5:
        threads = [threading.Thread(target=take, args=pair, daemon=True)
                   for pair in ((one, other), (other, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if options.mode == "endless" and step == 5:
        torch.cuda._sleep(2**62)
        torch.cuda.synchronize()
    rows = model(data)
    out = attention.select(rows, step) if options.mode == "select" else attention.attend(rows)
    loss = out.square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    time.sleep(0.005)
    print(f"step {step} loss {loss.item():.4f}", flush=True)
"""
SUITE = """\
schema: 1
title: A foreign repository
subject: Foreign repository
question: Does the harness say the right word about each thing planted here?
measure: {processes: 2, min_samples: 6, max_samples: 40, sample_s: 0.3, warmup_s: 2,
          timeout_s: <timeout_s>, stall_s: 60}
workloads:
  - name: attend
    factory: nsa.bench:attend
    providers: [own]
    axes: {seq_len: 64}
"""
PROGRAM = r"""  - name: <mode>
    command: "{python} train.py --mode <mode> <options>"
    axes: {<axes>}
    progress: 'step (?P<step>\d+) loss'
    metrics: {loss: {line: 'loss (?P<value>\S+)', unit: nats, better: lower, take: last}}
    tokens: [seq_len<tokens>]
    measure: {processes: 1, stall_s: <stall_s>}
"""
POLICY = f"""\
schema: 1
stage: block
suites: [{{suite: {SUITE_PATH}, cases: [attend]}}]
counters: [{{suite: {SUITE_PATH}, cases: [attend]}}]
"""


def files_of(planted: Planted, position: int, side: int) -> Mapping[str, str]:
    """The tree of a commit. It has neither suite nor policy."""
    broken = position in planted.unbuildable and side == 0
    return {
        "nsa/attention.py": ATTENTION.format(
            revision=f"{position}.{side}",
            syncs=2 if position >= planted.sync_at else 1,
            broken="import a_package_that_does_not_exist" if broken else "",
        ),
        "nsa/bench.py": BENCH,
        "train.py": TRAIN,
        ".gitignore": "__pycache__/\n",
    }


def suite_text(*, first_s: float, stall_s: float, timeout_s: float) -> str:
    """The newcomer's suite: a workload, and the script in each mode."""
    text = SUITE.replace("<timeout_s>", f"{timeout_s:g}")
    swallowed = "--seq_len {seq_len} --micro_batch {micro_batch}"
    for mode, options, axes, tokens in (
        ("plain", swallowed, "seq_len: 64, micro_batch: [1, 4]", ", micro_batch"),
        ("first", f"--first_s {first_s:g} --seq_len {{seq_len}}", "seq_len: 64", ""),
        ("deadlock", "--seq_len {seq_len}", "seq_len: 64", ""),
        ("endless", "--seq_len {seq_len}", "seq_len: 64", ""),
        ("select", "--seq_len {seq_len}", "seq_len: 64", ""),
    ):
        stall = stall_s if mode in ("first", "deadlock", "endless") else 60.0
        program = PROGRAM.replace("<mode>", mode).replace("<options>", options)
        program = program.replace("<stall_s>", f"{stall:g}")
        text += program.replace("<axes>", axes).replace("<tokens>", tokens)
    return text
