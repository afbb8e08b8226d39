"""Lines of training logs that say what went wrong: patterns of torch, NCCL, gloo, torchrun, Ray, vLLM.

Patterns follow what these programs print (public bug reports and their sources). Knows no order of
causes; triage decides. A line's text is never kept, only its number and the signal.
"""

import re
from dataclasses import dataclass
from typing import Literal

SignalName = Literal[
    "assert-index",
    "assert-probability",
    "assert",
    "device-error",
    "oom",
    "oom-generation",
    "oom-host",
    "collective-timeout",
    "collective-stuck",
    "collective-error",
    "rank-died",
    "stopped",
    "device-mismatch",
    "shape-mismatch",
    "dtype-mismatch",
    "data-error",
    "disk-full",
    "anomaly",
    "nan-error",
    "non-finite-text",
    "exception",
]


@dataclass(frozen=True)
class Signal:
    """A signal, its first line (from 1) and the exception's name or a matched operation, if any."""

    name: SignalName
    line: int
    detail: str = ""


_I = re.IGNORECASE
# Order matters: the first that matches a line is what the line says.
_PATTERNS: tuple[tuple[SignalName, re.Pattern[str]], ...] = (
    # Kernels of torch.multinomial alone assert in TensorCompare.cu; older ones print `input[0] != 0`.
    ("assert-probability", re.compile(r"probability tensor contains either|TensorCompare\.cu.*Assertion", _I)),
    (
        "assert-index",
        re.compile(
            r"Indexing\.cu.*Assertion|srcIndex < srcSelectDimSize|index out of bounds|IndexKernel.*Assertion"
            r"|t >= 0 && t < n_classes|ScatterGatherKernel.*Assertion|vectorized_gather_kernel.*Assertion"
            r"|index out of range in self|IndexError: Target \d+ is out of bounds|index -?\d+ is out of bounds",
            _I,
        ),
    ),
    ("assert", re.compile(r"device-side assert triggered|cudaErrorAssert|Assertion `.*` failed")),
    # Ray lists the killer of processes among possible causes of any death: that is no evidence of it.
    ("rank-died", re.compile(r"There are some potential root causes|Worker exit type: SYSTEM_ERROR")),
    (
        "oom-host",
        re.compile(
            r"OutOfMemoryError: Task was killed due to the node running low on memory|OOM killer|oom-kill"
            r"|Out of memory: Killed process|killed due to the node running low on memory"
            r"|Some of the step tasks have been OOM Killed|DefaultCPUAllocator: can't allocate memory"
            r"|exitcode\s*:\s*-9\b|exit code:? -9\b|Signal 9 \(SIGKILL\)|^MemoryError\b|OOMKilled"
            r"|^Killed$|: line \d+:\s+\d+ Killed\b",
            _I,
        ),
    ),
    (
        "oom-generation",
        re.compile(
            r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored"
            r"|not enough KV cache|larger than the available KV cache memory"
            r"|Free memory on device .* less than desired GPU memory utilization",
            _I,
        ),
    ),
    (
        "oom",
        re.compile(
            r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError"
            r"|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|NPU out of memory",
            _I,
        ),
    ),
    (
        "collective-timeout",
        re.compile(
            r"Watchdog caught collective operation timeout|Timeout at NCCL work|NCCL timeout"
            r"|Timed out waiting \d+ms for (send|recv) operation|DistBackendError.*timed out"
            r"|The client socket has timed out"
            r"|wait timeout after \d+ms|monitoredBarrier.*timed out|Socket Timeout|DistStoreError: Timed out",
            _I,
        ),
    ),
    (
        "collective-stuck",
        re.compile(
            r"watchdog got stuck|heartbeat monitor (timed|has) |Potentially (stuck|hanging)|HeartbeatMonitor.*stuck", _I
        ),
    ),
    (
        "rank-died",
        re.compile(
            r"ChildFailedError|ActorDiedError|RayActorError|The actor died unexpectedly|A worker died or was killed"
            r"|Connection closed by peer|Connection reset by peer|NCCL error.*remote process|Signal 1[15] \(SIG"
            r"|exitcode\s*:\s*-\d+|Segmentation fault|ncclRemoteError|ProcessExitedException|core dumped",
            _I,
        ),
    ),
    (
        "collective-error",
        re.compile(r"DistBackendError: NCCL error|nccl(System|Internal|UnhandledCuda|InvalidUsage)Error", _I),
    ),
    (
        "device-error",
        re.compile(
            r"CUDA error: (an illegal|unspecified launch|misaligned|invalid device|uncorrectable|invalid program)"
            r"|illegal memory access was encountered|CUDA driver error|NVRM: Xid",
            _I,
        ),
    ),
    (
        "stopped",
        re.compile(
            r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE)|\*\*\* (JOB|STEP) \S+ .*CANCELLED|^KeyboardInterrupt\b"
        ),
    ),
    ("device-mismatch", re.compile(r"Expected all tensors to be on the same device|found at least two devices", _I)),
    (
        "shape-mismatch",
        re.compile(
            r"size of tensor a \(\d+\) must match|mat1 and mat2 shapes cannot be multiplied|Sizes of tensors must match"
            r"|stack expects each tensor to be equal size|shape .* is invalid for input of size|shape mismatch"
            r"|Expected input batch_size|expected sequence of length \d+ at dim|size mismatch for "
            r"|Unable to create tensor, you",
            _I,
        ),
    ),
    (
        "dtype-mismatch",
        re.compile(
            r"expected scalar type|expected m1 and m2 to have the same dtype|mat1 and mat2 must have the same dtype"
            r"|not implemented for '(Half|BFloat16)'|should be the same dtype|value cannot be converted to type",
            _I,
        ),
    ),
    ("anomaly", re.compile(r"Function '(\w+)' returned nan values", _I)),
    (
        "nan-error",
        re.compile(
            r"loss scale already at minimum"
            r"|(loss|grad\w*|reward|advantage|logits?|log_?probs?)\b[^.,;]{0,40}\b(is|are|contains?|became)\b.{0,12}\b(nan|inf)",
            _I,
        ),
    ),
    ("disk-full", re.compile(r"No space left on device|Disk quota exceeded", _I)),
    (
        "data-error",
        re.compile(
            r"JSONDecodeError|UnicodeDecodeError|UnicodeEncodeError|DatasetGenerationError|ArrowInvalid"
            r"|surrogates not allowed|CastError: Couldn't cast|Prompt length \d+ is longer than"
            r"|is longer than max_length"
            r"|longer than the maximum model length|Can't find a dataset"
            r"|KeyError: '(prompt|response|reward|question|answer)'"
            r"|could not convert string to float",
            _I,
        ),
    ),
    ("exception", re.compile(r"^\s*((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Exit))(?::|$)")),
)
_NON_ERRORS = ("Warning", "KeyboardInterrupt")


def signal_of(line: str, number: int) -> Signal | None:
    """What a line (without rank and Ray prefixes) says, or None."""
    for name, pattern in _PATTERNS:
        match = pattern.search(line)
        if match is None:
            continue
        detail = match.group(1) or "" if name in ("exception", "anomaly") else ""
        if name == "exception" and detail.endswith(_NON_ERRORS):
            return None
        return Signal(name, number, detail[:80])
    return None
