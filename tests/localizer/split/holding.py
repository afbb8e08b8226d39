"""One process of a split model: argv are the snapshot, the number of processes, this one's and an address.

One line of JSON: bytes of parameters held here, of all of them, and by how much memory grew at most meanwhile.
"""

import json
import resource
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from gradloc.shards import local
from gradloc.snapshot import open_snapshot
from gradloc_localizer.driver import Options, rebuilt

url, num, rank, address = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(num))
assert AutoModelForCausalLM is not None  # imported before memory is looked at
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
policy, _ = rebuilt(open_snapshot(url), Options(device="cpu", num_threads=1, num_processes=int(num)))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
own = sum(local(one).numel() * one.element_size() for one in policy.parameters.values())
whole = sum(one.numel() * one.element_size() for one in policy.parameters.values())
sys.stdout.write(json.dumps([own, whole, grown]) + "\n")
dist.destroy_process_group()
