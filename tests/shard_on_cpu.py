"""
Lets accelerate (1.15) shard models with FSDP2 on CPUs, if `SHARD_ON_CPU` is set. It refuses to by the kind of device
alone; FSDP2 itself runs on the CPU.
"""

import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
    return "gloo", DistributedType.MULTI_GPU


IS_ON = "SHARD_ON_CPU" in os.environ and "LOCAL_RANK" in os.environ
if IS_ON:
    os.environ |= {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }
    PartialState._prepare_backend = _prepare_backend
