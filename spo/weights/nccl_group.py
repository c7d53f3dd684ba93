"""The sender's end of vLLM's own NCCL weight transfer; the other end is its NCCLWeightTransferEngine. Needs vLLM."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

# Tensors travel packed; both ends hold two buffers of this size.
BUFFER_BYTES = 256 << 20


def new_nccl_id() -> str:
    """A unique id for one group, in base64."""
    return b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


class NcclSender:
    """Rank 0 of one transfer, on this process's first device.

    NCCL itself waits without a deadline: receivers abort their end by theirs, and this process is killed by its parent.
    """

    def __init__(self, nccl_id: str, world_size: int) -> None:
        self._group = uid_init_process_group(
            b64decode(nccl_id), 0, world_size, torch.accelerator.current_device_index()
        )

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors of CPU memory, packed."""
        packed_nccl_broadcast_producer(
            iterator=(("", tensor) for tensor in tensors),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].cuda(),
            buffer_size_bytes=BUFFER_BYTES,
        )

    def destroy(self) -> None:
        """Leave the group."""
        self._group.destroy()
