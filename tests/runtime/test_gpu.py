"""What only a CUDA device can show: its kernels, streams and memory, and vLLM's graphs on the trainer's weights."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agent.models import resolve_model
from agent.policy import VLMPolicy
from configs.schema import AgentConfig, ModelConfig, RLConfig, RunConfig
from data.types import Group, Response, Rollout, Sampling, Turn, TurnKey, Vocabulary
from rl.losses import Scale, policy_loss
from runtime.kernels import BranchMask, Kernels, _attention, use_kernels
from runtime.memory import Ledger, model_shape
from runtime.prefix_tree import GradientBuffer, Row, Segment
from runtime.rollplex import Rollplex
from runtime.tower import run_tower
from runtime.update import Updater
from runtime.vlm import SplitVLM, load_vlm
from runtime.work import GroupWork, Packing
from tests.runtime.support import (
    load_tiny,
    naive_gradients,
    naive_logprobs,
    random_prompt,
    random_response,
    relative_error,
    vocabulary_of,
)
from tests.runtime.test_rollplex import prompts_of, record, replay, roll_out, run_config, train, weights
from tests.runtime.test_tower import clips, features_and_gradients

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(config: RunConfig) -> RunConfig:
    return replace(config, model=ModelConfig(path="tiny:qwen2_5_vl", dtype="bfloat16"))


# --- attention -------------------------------------------------------------------------------------------------------


def branch_row(lengths: list[int], prompt: int) -> Row:
    root = Segment(tuple(range(prompt)), torch.zeros(3, prompt, dtype=torch.long))
    leaves = [Segment((0,) * n, torch.zeros(3, n, dtype=torch.long), root, targets=(0,) * (n + 1)) for n in lengths]
    return Row(tuple(leaves), (Row((root,)),))


def attend(mask: BranchMask, leaves: list[Tensor], *, flex: bool) -> list[Tensor]:
    """Output of attention, and gradients of queries, keys and values for a fixed slope."""
    query, key, value = (leaf.detach().requires_grad_() for leaf in leaves)
    if flex:
        output = _attention(None, query, key, value, mask.blocks(), scaling=query.shape[-1] ** -0.5)[0].transpose(1, 2)
    else:
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        output = F.scaled_dot_product_attention(query, wide_key, wide_value, attn_mask=mask.dense())
    slope = torch.sin(torch.arange(output.numel(), device=output.device)).view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * slope).sum(), [query, key, value])]


@pytest.mark.parametrize(("lengths", "prompt"), [([5, 1, 40], 70), ([256] * 8, 1000), ([300, 7], 2048)])
def test_flex_attention_is_as_near_to_float64_as_a_dense_mask(lengths: list[int], prompt: int) -> None:
    mask = branch_row(lengths, prompt).mask()
    assert mask is not None
    mask = mask.to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    own, keys = sum(lengths), sum(lengths) + prompt
    shapes = [(1, 16, own, 128), (1, 2, keys, 128), (1, 2, keys, 128)]
    exact = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64) for shape in shapes]
    rounded = [tensor.bfloat16() for tensor in exact]
    expected = attend(mask, [tensor.double() for tensor in rounded], flex=False)
    dense, flex = attend(mask, rounded, flex=False), attend(mask, rounded, flex=True)
    for name, *results in zip(("output", "query", "key", "value"), expected, dense, flex, strict=True):
        errors = [relative_error(result.double(), results[0]) for result in results[1:]]
        logger.info("%s: dense %.2e, FlexAttention %.2e", name, *errors)
        assert errors[1] <= max(1.5 * errors[0], 1e-3), name


# --- the vision tower ------------------------------------------------------------------------------------------------


def test_a_compiled_tower_computes_what_hugging_face_computes(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    media = clips([(2, 4, 4), (3, 10, 22)])
    expected = features_and_gradients(model.model.visual, run_tower(model.model.visual, media))
    model = load_vlm(
        resolve_model("tiny:qwen2_5_vl", model_cache), torch.float32, train_tower=True, device=torch.device("cuda")
    )
    actual = features_and_gradients(model.model.visual, run_tower(model.model.visual, media))
    scale = max(float(tensor.norm()) for tensor in expected[1:])
    for host, compiled in zip(expected, actual, strict=True):
        if float(host.norm()) > 1e-5 * scale:
            assert relative_error(compiled.cpu(), host) <= 1e-4


# --- gradients in bf16 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 3B shape with four layers and a shallow tower."""
    folder = resolve_model("random:qwen2_5_vl_3b", tmp_path_factory.mktemp("shallow"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 4
    config["text_config"]["layer_types"] = ["full_attention"] * 4
    config["vision_config"] |= {"depth": 2, "fullatt_block_indexes": [1]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def group_of(model: Any) -> Group:
    """One prompt of 860 tokens, five responses of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    prompt = random_prompt(model, generator, num_text=600, frames=64)
    turns = [
        ((prompt, random_response(generator, length)), reward)
        for length, reward in zip((150, 7, 64, 200, 1), (1.0, 0.0, 0.5, 0.0, 1.0), strict=True)
    ]
    rollouts = [Rollout("e", (Turn(*turn),), reward, success=False, truncated=False) for turn, reward in turns]
    return Group(0, tuple(rollouts))


def float32_gradient(folder: Path, source: Any, vocabulary: Vocabulary, group: Group) -> Tensor:
    """The plain per-sequence gradient, in float32, of the bf16 model's weights."""
    model = load_vlm(folder, torch.float32, train_tower=False, device=torch.device("cuda"))
    model.load_state_dict({name: tensor.float() for name, tensor in source.state_dict().items()})

    def loss(group: Group, index: int, turn: Any, logprobs: Tensor) -> Tensor:
        rewards = group.rewards
        advantage = float((rewards - rewards.mean())[index] / rewards.std(correction=0))
        return -(advantage * (logprobs - logprobs.detach()).exp()).sum() / len(turn.response.token_ids)

    gradients = naive_gradients(model, vocabulary, [group], loss)
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def tree_gradient(model: Any, vocabulary: Vocabulary, folder: Path, group: Group, kernels: Kernels, share: bool) -> Any:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffer = GradientBuffer(parameters)
    actor = SplitVLM(model, vocabulary)
    actor.use_kernels(kernels)
    shape = model_shape(folder, "bfloat16", train_tower=False)
    updater = Updater(actor, buffer, shape, Ledger(), budget=1 << 30)
    for _ in updater.train(GroupWork.of(group, Packing(share, 2048)), policy_loss(RLConfig(), group, Scale(256))):
        pass
    return buffer.flat


def test_bf16_gradients_stay_near_float32_shared_or_not(shallow: Path) -> None:
    model = load_vlm(shallow, torch.bfloat16, train_tower=False, device=torch.device("cuda"))
    vocabulary, group = vocabulary_of(model), group_of(model)
    use_kernels(model, "plain")
    expected = float32_gradient(shallow, model, vocabulary, group)
    errors: dict[tuple[str, bool], float] = {}
    arms: tuple[Kernels, ...] = ("plain", "fused")
    for kernels in arms:
        for share in (False, True):
            actual = tree_gradient(model, vocabulary, shallow, group, kernels, share)
            cosine = float(F.cosine_similarity(actual, expected, dim=0))
            errors[kernels, share] = relative_error(actual, expected)
            error = errors[kernels, share]
            logger.info("%s, shared %s: relative error %.2e, cosine %.6f", kernels, share, error, cosine)
            assert cosine >= 0.999
    for kernels in ("plain", "fused"):
        assert errors[kernels, True] <= 1.1 * errors[kernels, False]


def test_the_stock_kernels_come_back(shallow: Path) -> None:
    model = load_vlm(shallow, torch.bfloat16, train_tower=False, device=torch.device("cuda"))
    vocabulary, group = vocabulary_of(model), group_of(model)
    turn = group.rollouts[0].turns[0]

    @torch.no_grad()
    def logprobs(kernels: Kernels) -> Tensor:
        use_kernels(model, kernels)
        return naive_logprobs(model, vocabulary, turn.prompt, turn.response)

    before = logprobs("plain")
    assert not torch.equal(logprobs("fused"), before)
    assert torch.equal(logprobs("plain"), before)


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(model_cache: Path) -> VLMPolicy:
    return VLMPolicy(AgentConfig(), resolve_model("tiny:qwen2_5_vl", model_cache), ("left", "right", "forward"))


@pytest.fixture(scope="module")
def recorded(policy: VLMPolicy) -> Any:
    prompts = prompts_of(policy, seed=1)
    generator = torch.Generator().manual_seed(0)
    responses = {key: random_response(generator, 1 + index % 6) for index, key in enumerate(prompts)}
    return prompts, responses


@pytest.mark.usefixtures("deterministic")
def test_streams_change_no_bit(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    expected = weights(replay(model_cache, policy, on_device(run_config("serial")), recorded))
    for schedule in ("overlapped", "streamed"):
        other = replay(model_cache, policy, on_device(run_config(schedule)), recorded)
        assert other.stats()["window/hidden_s"] > 0
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(other).items()), schedule
    apart = weights(replay(model_cache, policy, on_device(run_config("overlapped", window_sms=64)), recorded))
    distance = max(relative_error(tensor.float(), expected[name].float()) for name, tensor in apart.items())
    logger.info("a partition of 64 multiprocessors: weights after one update differ by at most %.1e", distance)
    assert distance < 1e-2


@pytest.mark.usefixtures("deterministic")
def test_an_offloaded_optimizer_makes_the_same_step(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    expected = weights(replay(model_cache, policy, on_device(run_config("serial")), recorded, live=False))
    config = on_device(run_config("serial", offload_optimizer=True))
    runtime = replay(model_cache, policy, config, recorded, live=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(runtime).items())
    (master,) = runtime.trainer.engine.optimizer.single_partition_of_fp32_groups
    assert master.device.type == "cpu"
    assert runtime.ledger.used["optimizer"] == 0


# --- vLLM on the trainer's weights -----------------------------------------------------------------------------------


def answer(runtime: Rollplex, policy: VLMPolicy) -> Response:
    prompt = prompts_of(policy, seed=9)[TurnKey(0, 0, 0)]
    runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=6, temperature=0.0), train=False)
    while runtime.has_unfinished():
        for _, response in runtime.poll():
            return response
    raise AssertionError("no response")


def test_vllm_follows_the_trainer_through_ten_updates(model_cache: Path, policy: VLMPolicy) -> None:
    config = on_device(run_config("overlapped", kv_cache_bytes=1 << 30))
    with Rollplex(config, resolve_model(config.model.path, model_cache), policy.vocabulary) as runtime:
        for step in range(11):
            prompts = prompts_of(policy, seed=step)
            responses = roll_out(runtime, prompts)
            awake = torch.cuda.mem_get_info()[0]
            stats = train(runtime, record(prompts, responses))
            assert stats["train/mismatch_prob"] < 0.005, step
            assert stats["train/ratio_max"] == 1.0
            assert runtime.engine.asleep
            assert torch.cuda.mem_get_info()[0] - awake > 0.9 * (1 << 30) or step == 0
            assert runtime.weights_shared_fraction == 1.0
        logger.info("after 10 updates: mean probability difference %.2e", stats["train/mismatch_prob"])
        before = answer(runtime, policy)
        assert answer(runtime, policy) == before
        with torch.no_grad():
            for name, parameter in runtime.trainer.engine.module.named_parameters():
                if "visual" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        runtime._publish()
        after = answer(runtime, policy)
        pairs = zip(before.behaviour_logprobs, after.behaviour_logprobs, strict=False)
        assert max(abs(a - b) for a, b in pairs) > 1e-3
