"""The optimizer: DeepSpeed ZeRO over the parameters that the rollout engine reads.

Gradients are summed by the prefix tree in one flat float32 buffer with the layout of DeepSpeed's own. Once a step they
are added over ranks, divided by the step's denominator and handed to ZeRO as the partition that it would have built
from `backward`; with stages 1 to 3 none passes through a low-precision tensor. Knows nothing of rollouts or losses.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from configs.schema import RuntimeConfig, TrainConfig
from runtime.prefix_tree import GradientBuffer
from runtime.weights import in_fused_order, pack

TESTED_DEEPSPEED = "0.19.8"


class NonFiniteGradient(UserError, RuntimeError):
    """The gradient holds infinities or NaN; no step was made."""


def init_distributed() -> None:
    """Join the process group that torchrun or deepspeed started, or make one of this process alone.

    Must run before vLLM starts: vLLM joins an existing group, and otherwise believes that it is alone.
    """
    import deepspeed

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
        }  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would compile C++ for 90 s
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        atexit.register(_leave_group)


def _leave_group() -> None:
    """End the group's threads while there is an interpreter: one that still holds a tensor then aborts the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Trainer:
    """AdamW under DeepSpeed ZeRO stage 0 to 3, and the buffer that gradients are summed in.

    Stages 0 to 2 hold every parameter whole in one flat buffer that is updated in place; stage 3 holds shards, and the
    parameters are whole only inside `gathered()`.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, runtime: RuntimeConfig) -> None:
        import deepspeed

        if deepspeed.__version__ != TESTED_DEEPSPEED:
            raise UserError(
                f"deepspeed {deepspeed.__version__} found, {TESTED_DEEPSPEED} needed: its ZeRO internals are used"
            )
        self.stage = runtime.zero_stage
        pack(in_fused_order(model, trainable=False))
        self.parameters = in_fused_order(model, trainable=True)
        dtype = self.parameters[0].dtype
        if self.stage == 0:
            pack(self.parameters)  # ZeRO-1 and 2 do the same with their own buffer
        optimizer = torch.optim.AdamW(
            self.parameters,
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            weight_decay=train.weight_decay,
            fused=torch.cuda.is_available(),  # unfused, a step needs several copies of the flat buffer
        )
        self.engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(train, runtime, dtype)
        )[0]
        self.gradients = self._gradient_buffer()
        self.offloads = runtime.offload_optimizer and torch.cuda.is_available()
        if self.offloads and self.stage not in (1, 2):
            raise UserError(
                f"runtime.offload_optimizer=true, expected false with runtime.zero_stage={self.stage}: DeepSpeed moves "
                "the states of stages 1 and 2."
            )
        self._offload()
        if self.stage == 3:
            self.engine.optimizer.parameter_offload._remove_module_hooks()  # `gathered` replaces them

    def _gradient_buffer(self) -> GradientBuffer:
        if self.stage == 3:
            with self.gathered():
                return GradientBuffer(self.parameters)
        if self.stage == 0:
            return GradientBuffer(self.parameters)
        (flat,) = self.engine.optimizer.bit16_groups_flat
        buffer = GradientBuffer(self.parameters, padded_to=flat.numel())
        for parameter in self.parameters:
            offset = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            assert buffer.views[parameter].storage_offset() == offset, "ZeRO reordered the parameters"
        return buffer

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every parameter is whole (ZeRO-3; the other stages always are)."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters()), enabled=self.stage == 3):
            yield

    def _offload(self) -> None:
        """Move the optimizer's states to pinned host memory; the first time pins it, which is slow."""
        if self.offloads:
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

            include = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
            self.engine.offload_states(include=include, pin_memory=True, non_blocking=False)
            torch.cuda.empty_cache()

    @contextmanager
    def _resident(self) -> Iterator[None]:
        """Inside, the optimizer's states are on the device."""
        if self.offloads:
            self.engine.reload_states()
        try:
            yield
        finally:
            self._offload()

    def step(self, lr: float, denominator: float) -> float:
        """Add gradients over ranks, divide by `denominator`, clip, update; returns the norm before clipping.

        Raises:
            NonFiniteGradient: on every rank, before anything is changed.
        """
        flat = self.gradients.flat
        torch.distributed.all_reduce(flat)
        flat.div_(denominator)
        norm = float(torch.linalg.vector_norm(flat))
        if not norm < float("inf"):
            flat.zero_()
            raise NonFiniteGradient(
                f"gradient norm is {norm} at learning rate {lr}: lower train.lr or look for NaN rewards"
            )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        with self._resident():
            self._hand_over(flat)
            self.engine.step()
        flat.zero_()
        return norm

    def _hand_over(self, flat: Tensor) -> None:
        """Give ZeRO this rank's gradients as if its own backward had left them."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            for parameter in self.parameters:
                parameter.grad = self.gradients.views[parameter].to(parameter.dtype)
        elif self.stage == 3:
            for index, group in enumerate(optimizer.fp16_groups):
                shards = [optimizer._get_fp32_grad_state_partition(p, release_swap_buffers=False)[0] for p in group]
                for parameter, shard in zip(group, shards, strict=True):
                    own = self.gradients.views[parameter].flatten()[self.rank * shard.numel() :][: shard.numel()]
                    shard.zero_()[: own.numel()].copy_(own)  # the last rank's shard may be padded
                optimizer.averaged_gradients[index] = shards
        else:
            from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

            size = int(optimizer.partition_size[0])
            partition = flat[self.rank * size : (self.rank + 1) * size]
            # One piece for the norm; padding at its end is zero.
            optimizer.averaged_gradients[0] = GradPartitionBufferGroup([partition], partition)
            optimizer.all_grad_tensors[0] = None

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state (every rank its part)."""
        with self._resident():
            self.engine.save_checkpoint(str(folder), tag="state")

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read what `save` wrote, into the memory that is in use.

        Raises:
            FileNotFoundError: the folder holds no such state.
        """
        with self._resident():
            path, _ = self.engine.load_checkpoint(str(folder), tag="state", load_module_only=weights_only)
        if path is None:
            raise FileNotFoundError(f"{folder}: no DeepSpeed state in it")


def _deepspeed_config(train: TrainConfig, runtime: RuntimeConfig, dtype: torch.dtype) -> dict[str, Any]:
    # In bfloat16 DeepSpeed has another optimizer for stage 1, without the flat buffer. Stage 2 differs in how gradients
    # are reduced, which is done here, so it makes the same step.
    stage = 2 if runtime.zero_stage == 1 and dtype == torch.bfloat16 else runtime.zero_stage
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.max_grad_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 500_000_000,
        },
    }
