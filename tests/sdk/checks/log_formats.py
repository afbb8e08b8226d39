"""Logs in the formats of public trainers, with the failures that their bug trackers report. Made here, not copied."""

import json
import math
import random

VERL = (
    "(TaskRunner pid=6311) step:{step} - global_seqlen/min:22900.000 - actor/entropy_loss:{entropy} - "
    "actor/kl_loss:{kl} - actor/kl_coef:0.001 - actor/pg_loss:{loss} - actor/pg_clipfrac:0.002 - actor/ppo_kl:{kl} - "
    "actor/grad_norm:{norm} - perf/max_memory_allocated_gb:{memory} - actor/lr:0.000 - critic/score/mean:{reward} - "
    "critic/rewards/mean:{reward} - critic/advantages/mean:-0.000 - response_length/clip_ratio:0.021"
)
ASSERT_PROBABILITY = (
    "../aten/src/ATen/native/cuda/TensorCompare.cu:110: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] "
    "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed."
)
ASSERT_INDEX = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1284: indexSelectLargeIndex: block: [19,0,0], thread: [64,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
ASSERT_ENDS = [
    "Traceback (most recent call last):",
    '  File "grpo_trainer.py", line 564, in _prepare_inputs',
    "RuntimeError: CUDA error: device-side assert triggered",
    "CUDA kernel errors might be asynchronously reported at some other API call",
]
NCCL = (
    "[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 4.09 GiB is free."
)
RAY_DEATH = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker exit type: "
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are "
    "some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. "
    "(2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
RAY_MEMORY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. "
    "Memory on the node (IP: 10.0.0.7) was 953.61GB / 1000.00GB (0.953610), which exceeds the memory usage threshold."
)
CHILD = [
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "Root Cause (first observed failure):",
    "  rank      : 3 (local_rank: 3)",
]


def noise(seed):
    rng = random.Random(seed)
    return lambda: rng.gauss(0.0, 1.0)


def verl(num, *, last=None, memory=lambda step: 27.05, reward=lambda step: 0.3 + 0.005 * step):
    draw = noise(1)
    lines = ["(TaskRunner pid=6311) Training from scratch", "Processed prompts: 100%|####| 512/512 [00:41<00:00]"]
    for step in range(1, num + 1):
        values = {
            "entropy": f"{0.4 + 0.01 * draw():.3f}",
            "kl": f"{0.001 + 0.0001 * abs(draw()):.4f}",
            "loss": f"{0.02 * draw():.3f}",
            "norm": f"{0.4 * math.exp(0.1 * draw()):.3f}",
            "memory": f"{memory(step):.3f}",
            "reward": f"{reward(step) + 0.01 * draw():.3f}",
        }
        if step == num:
            values |= last or {}
        lines.append(VERL.format(step=step, **values))
    return lines


def trl(num, *, change=lambda step, row: row, text=str):
    draw = noise(2)
    lines = []
    for step in range(1, num + 1):
        row = {
            "loss": round(0.02 * draw(), 4),
            "grad_norm": 0.5 * math.exp(0.1 * draw()),
            "learning_rate": 1e-06,
            "num_tokens": 46372.0 * step,
            "completions/mean_length": 262.9,
            "completions/clipped_ratio": 0.01,
            "reward": 0.4 + 0.004 * step + 0.01 * draw(),
            "reward_std": 0.3,
            "frac_reward_zero_std": 0.25,
            "kl": 0.0006 + 0.0001 * abs(draw()),
            "entropy": 0.51 + 0.01 * draw(),
            "epoch": round(0.01 * step, 2),
        }
        lines.append(text(change(step, row)))
        lines.append(f" {step}%|#         | {step}/1000 [{step:02d}:29<1:22:01,  9.20s/it]")
    return lines


def with_strings(row):
    """As newer Trainers print: every number a string."""
    return str({name: str(value) for name, value in row.items()})


def openrlhf(num, *, last=None):
    draw = noise(3)
    lines = []
    for step in range(1, num + 1):
        row = {
            "policy_loss": 0.01 * draw(),
            "actor_lr": 5e-7,
            "kl": 0.002 + 0.0002 * abs(draw()),
            "reward": 0.2 + 0.004 * step + 0.01 * draw(),
            "return": 0.2,
            "response_length": 511.2,
            "policy_grad_norm": 0.5,
        }
        if step == num:
            row |= last or {}
        lines.append(f"(PPOTrainer pid=991) Global step {step}: {row}")
    return lines


def trainer_state(num, *, last=None):
    draw = noise(4)
    history = [
        {"step": step, "loss": 0.01 * draw(), "grad_norm": 0.4 * math.exp(0.1 * draw()), "reward": 0.3 + 0.005 * step}
        for step in range(1, num + 1)
    ]
    if last:
        history[-1] |= last
    return [json.dumps({"best_metric": None, "epoch": 1.0, "global_step": num, "log_history": history})]


def timed(num, silent_s):
    """A logger's lines with times, after whose last step only heartbeats come."""
    lines = []
    for step in range(num):
        lines.append(
            f"2026-03-01 10:{step:02d}:00,123 INFO trainer step {step} loss: 0.0{step % 7} reward: 0.{30 + step}"
        )
    end = num * 60 - 60 + silent_s
    lines.append(f"2026-03-01 {10 + end // 3600:02d}:{end // 60 % 60:02d}:{end % 60:02d},000 INFO raylet heartbeat")
    return lines


# name: (lines, branch, layer, suffix)
FAILURES = {
    "verl: all NaN at step 83": (
        verl(83, last={"entropy": "nan", "kl": "nan", "loss": "nan", "norm": "nan", "reward": "-1.000"}),
        "nan",
        "policy",
    ),
    "verl: loss finite, norm NaN": (verl(40, last={"norm": "nan"}), "nan", "gradient"),
    "TRL: reward NaN first": (
        trl(30, change=lambda step, row: row | ({"reward": math.nan, "loss": math.nan} if step > 20 else {})),
        "nan",
        "reward",
    ),
    "TRL: numbers as strings, KL NaN": (
        trl(30, change=lambda step, row: row | ({"kl": math.nan} if step > 20 else {}), text=with_strings),
        "nan",
        "policy",
    ),
    "ms-swift: NaN, then lr 0": (
        trl(40, change=lambda s, row: row | ({"grad_norm": math.nan, "kl": math.nan, "loss": 0.0} if s > 30 else {})),
        "nan",
        "policy",
    ),
    "OpenRLHF: policy loss NaN": (openrlhf(25, last={"policy_loss": math.nan}), "nan", "policy"),
    "trainer_state.json: infinite norm": (trainer_state(60, last={"grad_norm": math.inf}), "nan", "gradient"),
    "TRL: probability assert": ([*trl(12), ASSERT_PROBABILITY, *ASSERT_ENDS], "device-assert", "policy"),
    "TRL: index assert": ([*trl(2), ASSERT_INDEX, *ASSERT_ENDS], "device-assert", "data"),
    "an assert without its text": ([*trl(12), *ASSERT_ENDS], "device-assert", "data"),
    "NaN before the assert": (
        [*trl(30, change=lambda s, row: row | ({"grad_norm": math.nan} if s == 30 else {})), ASSERT_PROBABILITY],
        "nan",
        "gradient",
    ),
    "verl: memory grows, then OOM": ([*verl(40, memory=lambda step: 40 + step), OOM], "oom", "optimizer"),
    "TRL: OOM at a long batch": ([*trl(30), OOM], "oom", "data"),
    "OOM at once": (["Loading checkpoint shards: 100%|###| 4/4", OOM], "oom", "data"),
    "OOM on one rank, time-outs on others": ([*trl(15), NCCL.format(rank=3), OOM, *CHILD], "oom", "data"),
    "vLLM: no memory left": (
        ["ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"],
        "oom",
        "policy",
    ),
    "Ray: node out of memory": ([*openrlhf(20), RAY_MEMORY, RAY_DEATH], "host-oom", "optimizer"),
    "torchrun: SIGKILL": ([*trl(12), *CHILD, "  exitcode  : -9 (pid: 4711)"], "host-oom", "optimizer"),
    "Ray: a worker died": ([*openrlhf(20), RAY_DEATH], "rank-died", None),
    "torchrun: segmentation fault": ([*trl(12), *CHILD, "  exitcode  : -11 (pid: 4711)"], "rank-died", None),
    "NCCL time-out": ([*trl(15), NCCL.format(rank=0), NCCL.format(rank=4), *CHILD], "nccl-timeout", "optimizer"),
    "NCCL watchdog stuck": (
        [
            *openrlhf(20),
            "[rank0]:[F1225 ProcessGroupNCCL.cpp:1306] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck",
        ],
        "hang",
        "optimizer",
    ),
    "NCCL error": (
        [
            *trl(15),
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error",
            *CHILD,
        ],
        "nccl-error",
        "optimizer",
    ),
    "illegal memory access": (
        [*trl(15), "RuntimeError: CUDA error: an illegal memory access was encountered", *CHILD],
        "device-error",
        None,
    ),
    "an older probability assert": (
        [
            *trl(2),
            "TensorCompare.cu:110: block: [0,0,0], thread: [0,0,0] Assertion `input[0] != 0` failed.",
            *ASSERT_ENDS,
        ],
        "device-assert",
        "policy",
    ),
    "vLLM sleeps and wakes without memory": (
        [*openrlhf(20), "RuntimeError: CUDA error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"],
        "oom",
        "data",
    ),
    "killed by the kernel, said by the shell": (
        [*trl(15), "train.sh: line 3: 4711 Killed   python train.py"],
        "host-oom",
        "optimizer",
    ),
    "SLURM: time limit": (
        [*trl(30), "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-01T00:00:00 DUE TO TIME LIMIT ***"],
        "stopped",
        None,
    ),
    "Ctrl-C": ([*trl(30), "Traceback (most recent call last):", "KeyboardInterrupt"], "stopped", None),
    "ms-swift: no gradient, rewards differ": (
        [
            json.dumps(
                {
                    "loss": -0.0,
                    "grad_norm": 0.0,
                    "reward": 0.7 + 0.01 * (s % 3),
                    "reward_std": 0.13,
                    "global_step/max_steps": f"{s}/547",
                }
            )
            for s in range(1, 31)
        ],
        "plateau",
        "gradient",
    ),
    "DeepSpeed: loss scale at its minimum": (
        [*trl(15), "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."],
        "nan",
        "policy",
    ),
    "silence after step 20": (timed(20, 7_200), "hang", "optimizer"),
    "rewards on the host": (
        [*trl(1), "RuntimeError: Expected all tensors to be on the same device, but found at least two devices"],
        "device-mismatch",
        "data",
    ),
    "a disk without room": ([*trl(15), "OSError: [Errno 28] No space left on device"], "disk-full", None),
    "verl: reward collapses": (
        verl(80, reward=lambda step: 0.2 + 0.01 * step if step < 55 else 0.02),
        "collapse",
        "policy",
    ),
    "TRL: all rewards .8": (
        trl(50, change=lambda s, row: row | ({"reward": 0.8, "loss": 0.0, "grad_norm": 0.0} if s > 25 else {})),
        "plateau",
        "reward",
    ),
    "saw-tooth": (
        trl(60, change=lambda s, row: row | {"loss": (-1) ** s * 0.01 * 1.05**s}),
        "saw-tooth",
        "policy",
    ),
    "a norm of 640": (trl(60, change=lambda s, r: r | ({"grad_norm": 640.0} if s == 44 else {})), "spike", "gradient"),
}
HEALTHY = {
    "OpenRLHF, progress bars": [
        f"Train epoch [3/3]: {s}%|##| {s}/40 [00:11<00:05, 1.9s/it, act_loss={0.02 * (s % 3):.4f}, "
        f"reward={0.2 + 0.004 * s:.3f}, gen_len=318, kl=0, act_lr=2.44e-7]"
        for s in range(40)
    ],
    "verl": verl(60),
    "TRL": trl(60),
    "TRL, numbers as strings": trl(60, text=with_strings),
    "OpenRLHF": openrlhf(60),
    "trainer_state.json": trainer_state(60),
    "with times": timed(40, 60),
    "JSON lines": [
        json.dumps({"step": s, "loss": 0.01 * (s % 5), "grad_norm": 0.4 + 0.01 * (s % 3)}) for s in range(60)
    ],
}
UNKNOWN = {
    "nothing": [],
    "a letter": ["Dear colleague,", "the training went well."],
    "an exception of one's own": ["Traceback (most recent call last):", "my_lab.errors.MoonPhaseError: wrong phase"],
    "three steps": trl(3),
    "bytes": ["\x00\x01\x7f\ufffd" * 100],
}
