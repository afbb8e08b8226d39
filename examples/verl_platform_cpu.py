"""verl's platform for a machine without an accelerator: what its engines ask of one."""

import contextlib
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_, **__):
    return None


class _Device(types.ModuleType):
    """torch.cpu, and what torch.cuda has beside it."""

    def mem_get_info(self, *_):
        return 1, 1

    def memory_allocated(self, *_):
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def __getattr__(self, name):
        return getattr(torch.cpu, name, None) or _nothing


_DEVICE = _Device("cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "gradloc"

    @property
    def device_module(self):
        return _DEVICE

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = _nothing

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
