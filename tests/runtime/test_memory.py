from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent.models import resolve_model
from configs.schema import AgentConfig, RLConfig, RolloutConfig, RunConfig, RuntimeConfig, TrainConfig
from rl.losses import Scale, policy_loss
from runtime.memory import HBMExhausted, Ledger, LedgerError, ModelShape, format_bytes, model_shape, plan
from runtime.prefix_tree import GradientBuffer
from runtime.update import Updater
from runtime.vlm import SplitVLM
from runtime.work import GroupWork, Packing
from tests.runtime.support import load_tiny, random_chain_group, vocabulary_of

SHAPE = ModelShape(
    parameters=1000, trainable=800, layers=2, hidden=8, intermediate=16, key_value=4, vocabulary=32, item_bytes=2
)


def sizes(config: RunConfig, world_size: int = 1) -> dict[str, int]:
    return {buffer.name: buffer.num_bytes for buffer in plan(config, SHAPE, world_size).buffers}


def test_plan_counts_bytes_by_hand() -> None:
    config = RunConfig(runtime=RuntimeConfig(microbatch_tokens=16, kv_cache_bytes=5000, boundary_budget_bytes=777))
    assert sizes(config) == {
        "weights": 2000,
        "kv_cache": 5000,
        "reference": 0,
        "gradients": 4 * 800,
        "optimizer": 12 * 800,
        "boundaries": 777,
        "vision_features": 256 << 20,
        # A row of 16 tokens, 2 layers, 2 bytes: boundary 4 + 8, graph 8 hiddens, 3 intermediates and keys and values;
        # and of the longest prompt one layer's graph, two copies of its keys and values, their gradients in 4 bytes.
        "activations": 16 * 2 * 2 * (4 + 8)
        + 16 * 2 * 2 * (8 * 8 + 3 * 16 + 4)
        + 1016 * 2 * (8 * 8 + 3 * 16 + 4)
        + 2 * (1016 * 2 * 4 * 2)
        + 1016 * 2 * 4 * 4,
        "logits": 4 * 4 * 16 * 32,
    }


def test_a_chain_keeps_the_turns_of_a_group() -> None:
    runtime = RuntimeConfig(microbatch_tokens=16, boundary_budget_bytes=0, max_model_len=512)
    rl = RLConfig(group_size=4, kl_coef=0.1)
    found = sizes(RunConfig(runtime=runtime, rl=rl, agent=AgentConfig(context="history")))
    # 4 x 512 tokens, 2 layers, 2 bytes: keys and values 4 and inputs 8 of the actor, keys and values 4 of the reference
    assert found["boundaries"] == 4 * 512 * 2 * 2 * (4 + 8 + 4)


@pytest.mark.parametrize("turns", [2, 6])
@pytest.mark.parametrize("budget", [0, 300_000])
def test_a_chain_holds_no_more_than_its_plan(turns: int, budget: int, model_cache: Path) -> None:
    model, ledger, rl = load_tiny(model_cache, torch.float32), Ledger(), RLConfig(group_size=3, kl_coef=0.1)
    folder = resolve_model("tiny:qwen2_5_vl", model_cache)
    shape = model_shape(folder, "float32", train_tower=True)
    generator = torch.Generator().manual_seed(turns)
    group = random_chain_group(model, generator, 0, [[4] * turns] * 3, [1.0, 0.0, 0.5])
    longest = max(len(turn.prompt.token_ids) for rollout in group.rollouts for turn in rollout.turns)
    runtime = RuntimeConfig(microbatch_tokens=64, max_model_len=longest + 4, boundary_budget_bytes=budget)
    config = RunConfig(
        agent=AgentConfig(context="history"), rl=rl, rollout=RolloutConfig(max_tokens=4), runtime=runtime,
        train=TrainConfig(vision_tower="trained"),
    )  # fmt: skip
    updater = Updater(
        SplitVLM(model, vocabulary_of(model)), GradientBuffer(list(model.parameters())), shape, ledger, budget
    )
    updater.reference = SplitVLM(load_tiny(model_cache, torch.float32), vocabulary_of(model))
    deque(updater.train(GroupWork.of(group, Packing(True, 64, chain=True)), policy_loss(rl, group, Scale(9))), maxlen=0)
    planned = {buffer.name: buffer.num_bytes for buffer in plan(config, shape).buffers}
    assert ledger.buffer_peaks["boundaries"] <= planned["boundaries"]
    assert ledger.buffer_peaks["activations"] <= planned["activations"]


def test_a_trained_towers_graph_is_of_a_batch_of_clips_or_of_the_longest() -> None:
    def graph(max_model_len: int, context_clips: int) -> int:
        config = RunConfig(
            runtime=RuntimeConfig(max_model_len=max_model_len), agent=AgentConfig(context_clips=context_clips)
        )
        with_tower = plan(config, replace(SHAPE, tower_graph=10)).buffers
        return sum(buffer.num_bytes for buffer in with_tower) - sum(sizes(config).values())

    assert graph(1024, 1) == 4096 * 10 * 2
    # A prompt of 9,992 tokens (8 are left for the response) that are one clip, or three.
    assert graph(10_000, 1) == 9992 * 4 * 10 * 2
    assert graph(10_000, 3) == 3330 * 4 * 10 * 2


def test_what_leaves_the_device_is_pinned_in_powers_of_two() -> None:
    config = RunConfig(rl=RLConfig(kl_coef=0.1), runtime=RuntimeConfig(offload_optimizer=True))
    # Master and two moments of 800 float32 each, 3,200 bytes; a reference of 800 bfloat16, 1,600.
    assert plan(config, SHAPE).host_bytes() == 3 * 4096 + 2048
    assert plan(RunConfig(rl=RLConfig(kl_coef=0.1)), SHAPE).host_bytes() == 0


def test_reference_costs_weights_and_ranks_share_the_optimizer() -> None:
    config = RunConfig(rl=RLConfig(kl_coef=0.1))
    assert sizes(config)["reference"] == 2 * 800  # the frozen tower is the actor's
    assert sizes(config, world_size=2)["optimizer"] == 6 * 800
    stage0 = RunConfig(runtime=RuntimeConfig(zero_stage=0))
    assert sizes(stage0, world_size=2)["optimizer"] == 12 * 800


def test_what_is_offloaded_is_in_hbm_for_the_update_alone() -> None:
    config = RunConfig(rl=RLConfig(kl_coef=0.1), runtime=RuntimeConfig(offload_optimizer=True))
    places = {buffer.name: list(buffer.residency.values()) for buffer in plan(config, SHAPE).buffers}
    assert places["optimizer"] == ["HOST", "HOST", "HOST", "HBM"]
    assert places["reference"] == ["HBM", "HBM", "HBM", "HOST"]
    assert plan(config, SHAPE).peak("update") == (256 << 20) + 2000 + 4 * 800 + 12 * 800


def test_boundaries_live_from_the_rollout_on_only_where_they_are_computed_early() -> None:
    for schedule, reuse_prefill, phases in (
        ("serial", False, "score train"),
        ("serial", True, "rollout score train"),
        ("overlapped", False, "rollout score train"),
    ):
        config = RunConfig(runtime=RuntimeConfig(schedule=schedule, reuse_prefill=reuse_prefill))  # type: ignore[arg-type]
        (held,) = [buffer for buffer in plan(config, SHAPE).buffers if buffer.name == "boundaries"]
        assert [phase for phase, place in held.residency.items() if place == "HBM"] == phases.split()


def test_plan_that_does_not_fit_names_the_phase_and_the_knob() -> None:
    config = RunConfig(runtime=RuntimeConfig(kv_cache_bytes=1 << 30))
    with pytest.raises(HBMExhausted, match=r'phase "rollout" needs .*kv_cache 1\.0 GiB.*runtime\.kv_cache_bytes'):
        plan(config, SHAPE).check(1 << 20)


def test_model_shape_counts_the_parameters_of_the_real_model(model_cache: Path) -> None:
    import torch

    from runtime.vlm import load_vlm

    folder = resolve_model("tiny:qwen2_5_vl", model_cache)
    model = load_vlm(folder, torch.float32, train_tower=False)
    shape = model_shape(folder, "float32", train_tower=False)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (shape.layers, shape.item_bytes) == (len(model.model.language_model.layers), 4)


def test_table_and_json_say_the_same() -> None:
    result = plan(RunConfig(), SHAPE)
    table = result.table().splitlines()
    assert table[0].split() == ["buffer", "size", "rollout", "score", "train", "update"]
    assert table[2].split() == ["kv_cache", "64.0", "MiB", "HBM", "DISCARDED", "DISCARDED", "DISCARDED"]
    values = json.loads(result.to_json())
    assert values["buffers"]["kv_cache"]["bytes"] == 64 << 20
    assert values["peak_bytes"]["update"] == (256 << 20) + 2000 + 4 * 800 + 12 * 800


def test_ledger_returns_what_it_takes_and_remembers_peaks() -> None:
    ledger = Ledger()
    ledger.lease("weights", 100)
    first = ledger.lease("boundaries", 30)
    ledger.enter("train")
    with ledger.hold("logits", 7):
        ledger.release(first)
        second = ledger.lease("boundaries", 50)
    ledger.release(second)
    ledger.check_integrity(empty=("boundaries", "logits"))
    assert ledger.peaks == {"rollout": 130, "score": 0, "train": 157, "update": 0}
    assert ledger.buffer_peaks == {"weights": 100, "boundaries": 50, "logits": 7}


def test_ledger_refuses_a_second_release_and_names_a_leak() -> None:
    ledger = Ledger()
    token = ledger.lease("boundaries", 30)
    with pytest.raises(LedgerError, match="30 bytes of boundaries"):
        ledger.check_integrity(empty=("boundaries",))
    ledger.release(token)
    with pytest.raises(LedgerError, match="twice"):
        ledger.release(token)


def test_format_bytes_uses_binary_units() -> None:
    assert [format_bytes(size) for size in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
