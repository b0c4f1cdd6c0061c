"""Progress of training: the record, and where it is written: CSV, TensorBoard, a figure."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

from nsa.errors import TrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Loss and speed after a step."""

    step: int
    """Optimiser steps taken."""
    loss: float
    """Nats per byte: mean over all ranks and the steps since the last Progress."""
    bits_per_byte: float
    """The same in bits."""
    held_out_bits_per_byte: float | None
    """Of the held-out split; None if it was not evaluated."""
    tokens_per_s: float | None
    """Of all ranks since the last Progress; None at the first step, which also warms up."""
    mfu: float | None
    """Model FLOPs utilisation: share of the GPUs' data-sheet peak; None without
    tokens_per_s or if the peak is unknown."""
    elapsed_s: float
    """Since the first step began."""
    gradient_norm: float
    """Of the last step, before clipping; NaN or infinite where fp16 left a step out."""
    losses: tuple[float, ...] = ()
    """Of each step since the last Progress, in nats per byte."""
    gradient_norms: tuple[float, ...] = ()
    """Likewise; not in the logs, whose lines have one number a name."""

    def logged(self) -> dict[str, float | None]:
        """What a line of a log has, by name."""
        return {n: v for n, v in asdict(self).items() if not isinstance(v, tuple)}

    def __str__(self) -> str:
        line = f"step {self.step:6d}  loss {self.loss:.4f}  bits/byte {self.bits_per_byte:.4f}"
        line += f"  grad norm {self.gradient_norm:.4g}"
        if self.held_out_bits_per_byte is not None:
            line += f"  held out {self.held_out_bits_per_byte:.4f}"
        rate = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        line = f"{line}  tokens/s {rate}"
        if self.mfu is not None:
            line += f"  MFU {100 * self.mfu:.1f} %"
        return f"{line}  elapsed {self.elapsed_s:.1f} s"


Sink = Callable[[Progress], None]


def csv_sink(path: Path, steps_done: int = 0) -> Sink:
    """Write one line per Progress to `path`, each on disk at once, after those of the steps done.

    The file is not changed before the first Progress.

    Raises:
        TrainError: The file cannot be written; also from the sink, when the disk is full.
    """

    def write(row: Iterable[object], mode: str = "a") -> None:
        # Opened for each line, so that a full disk is an error here and not when it is closed.
        with writing(path), path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # fail before the first steps, not after
    begun = False

    def sink(progress: Progress) -> None:
        nonlocal begun
        if not begun:
            rows = path.read_text(encoding="utf-8").splitlines()[1:] if steps_done else ()
            write(progress.logged(), mode="w")
            for row in (row.split(",") for row in rows):
                if row[0].isdecimal() and int(row[0]) <= steps_done:
                    write(row)
            begun = True
        write(progress.logged().values())

    return sink


def tensorboard_sink(stack: ExitStack, folder: Path, steps_done: int = 0) -> Sink:
    """Write TensorBoard events into a folder, after those of the steps done; the stack closes them.

    Raises:
        TrainError: The package is not installed, or the folder cannot be written.
    """
    try:
        tensorboard = import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise TrainError(
            f"NSA_TB_DISABLE=0 requests TensorBoard logs, which need a package ({error})",
            "Run pip install tensorboard, or unset NSA_TB_DISABLE.",
        ) from error
    with writing(folder):
        writer = tensorboard.SummaryWriter(str(folder), purge_step=steps_done + 1)
    stack.callback(writer.close)

    def write(progress: Progress) -> None:
        for name, value in progress.logged().items():
            if value is not None and name != "step":
                writer.add_scalar(name, value, progress.step)

    return write


def draw_curve(path: Path, curve: Sequence[Progress], *, unigram_bits: float, title: str) -> None:
    """Draw bits per byte against steps as a PNG, with the unigram entropy as a level.

    Raises:
        TrainError: The file cannot be written.
    """
    # Imported here: training itself does not need it, and it is slow to import.
    from matplotlib.figure import Figure

    steps = [p.step for p in curve]
    held_out = [p.held_out_bits_per_byte for p in curve if p.held_out_bits_per_byte is not None]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [p.bits_per_byte for p in curve], label="training", linewidth=1)
    if held_out:
        axes.plot(steps, held_out, label="held out", linewidth=2)
    last = held_out[-1] if held_out else curve[-1].bits_per_byte
    axes.axhline(unigram_bits, color="0.35", linestyle="--", linewidth=1)
    for bits, text, rise in ((unigram_bits, "unigram entropy ", 6), (last, "", -16)):
        axes.annotate(
            f"{text}{bits:.2f}",
            (steps[-1], bits),
            textcoords="offset points",
            xytext=(0, rise),
            ha="right",
        )
    axes.set(title=title, xlabel="optimiser step", ylabel="bits per byte", ylim=(0, 8.5))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    with writing(path):
        figure.savefig(path, dpi=120)


def check_writable(path: Path) -> None:
    """Raise TrainError before training starts if `path` cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one message."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"{path}: cannot be written: {error.strerror or error}",
            "Choose another path, or free disk space.",
        ) from error
