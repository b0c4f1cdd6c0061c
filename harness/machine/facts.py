"""What is known of a machine, and how each fact moves a number, in tables.

`drift` compares these facts of two environments, in this order, most suspect first. The `doctor`
checks those with a right value. `requirements` names what sets one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.records import Grade


@dataclass(frozen=True, slots=True)
class Right:
    """The value of a setting that is right for timing."""

    label: str
    """The setting in a check of the doctor."""
    value: bool
    wrong: Grade = Grade.WARN
    """The grade of another value."""
    since: tuple[int, int] = (0, 0)
    """The compute capability from which a GPU has it."""


GPU: Mapping[str, tuple[str, str]] = {
    "GPU UUID": ("uuid", "cards of one model differ by some per cent, up to a tenth"),
    "GPU memory": ("memory_bytes", "ECC, a slice of the card, or another variant of it"),
    "driver": ("driver", "it does launches, clocks and the compilation of PTX"),
    "CUDA of the driver": ("cuda_driver", "it does launches and the compilation of PTX"),
    "power limit (W)": ("power_limit_w", "the clock falls when the card reaches its limit"),
    "highest SM clock (Hz)": ("max_sm_clock_hz", "the clock bounds every kernel"),
}
"""Name -> field of records.Gpu, and why it is compared."""
VERSIONS: Mapping[str, str] = {
    "torch": "other kernels, dispatch cost and defaults",
    "triton": "the same kernel compiles to other instructions",
    "cuda": "the libraries choose other kernels",
    "cudnn": "attention and convolutions run other kernels",
    "flash-attn": "another attention kernel, or none",
    "numpy": "data preparation on the host changes speed",
    "python": "host time per step and the standard library change",
    "harness": "the measuring protocol may differ",
}
"""Other versions come after these."""
SETTINGS: Mapping[str, str] = {
    "device": "another kind of device",
    "debug_build": "assertions in every operator",
    "launch_blocking": "every launch waits for the kernel",
    "anomaly_mode": "every backward step is checked",
    "allow_tf32_matmul": "float32 matrix products run up to eight times faster with it",
    "allow_tf32_cudnn": "float32 convolutions run up to eight times faster with it",
    "float32_matmul_precision": "float32 matrix products change speed",
    "deterministic": "deterministic kernels are slower",
    "flash_attention_in_torch": "attention uses another kernel",
    "allocator": "cost and fragmentation of allocations change",
    "allocator_config": "cost and fragmentation of allocations change",
    "expandable_segments": "without them, fragmentation can exhaust the memory",
    "num_threads": "work on the CPU is spread over more or fewer threads",
    "cpu_capability": "CPU kernels use other vector instructions",
}
"""Settings of torch in a worker; others come after these."""
RIGHT: Mapping[str, Right] = {
    "debug_build": Right("debug build", False, Grade.FAIL),
    "anomaly_mode": Right("anomaly mode", False, Grade.FAIL),
    "allow_tf32_matmul": Right("TF32", True, since=(8, 0)),
    "deterministic": Right("deterministic kernels", False),
    "flash_attention_in_torch": Right("FlashAttention-2", True, since=(8, 0)),
    "expandable_segments": Right("expandable segments", True),
}
"""Settings of torch with a right value."""
REMEDIES: Mapping[str, str] = {
    "debug_build": "Install a torch that is built for release.",
    "anomaly_mode": "Turn it off for timing: torch.autograd.set_detect_anomaly(False).",
    "allow_tf32_matmul": "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (0: exact float32)",
    "float32_matmul_precision": "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (high; 0: highest)",
    "deterministic": "Turn them off for timing: torch.use_deterministic_algorithms(False).",
    "expandable_segments": "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "flash_attention_in_torch": "Install a torch that is built with FlashAttention.",
}
"""What sets a setting of torch, before a workload starts."""
DISTORTING: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TRITON_INTERPRET": "Triton kernels are interpreted on the CPU",
}
"""Environment variables that make timings invalid."""
VARIABLES: Mapping[str, str] = {
    **DISTORTING,
    "NSA_": "the code under test takes another route",
    "TRITON_": "kernels are compiled or cached differently",
    "CUDA_": "other devices are visible, or launches behave differently",
    "TORCH_": "torch uses other kernels or compiler passes",
    "PYTORCH_": "the allocator or the dispatcher behaves differently",
    "NCCL_": "communication takes another path",
    "OMP_": "work on the CPU is spread over more or fewer threads",
    "LD_": "other libraries are loaded",
    "PYTHONPATH": "modules are imported from elsewhere",
}
"""By the beginning of their names."""
INTERPRETER = "interpreter"
"""The difference of two installations."""
MACHINE: Mapping[str, tuple[str, str]] = {
    "CPU": ("cpu", "launches and data loading follow the speed of one core"),
    "CPU count": ("cpu_count", "loaders and compilers share the cores"),
    "host memory": ("memory_bytes", "the file cache has another size"),
    "operating system": ("os", "the cost of scheduling and system calls changes"),
    "host": ("hostname", "other cooling, other neighbours, another PCIe slot"),
}
"""Name -> field of records.Environment, and why it is compared."""
