"""Prompts taken from vLLM's own prefill: real vLLM and trainer on one storage, and a fake runner for odd batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import AgentConfig, RunConfig
from data.types import Group, Prompt, Response, Rollout, Sampling, Turn, TurnKey
from rl.losses import Scale, policy_loss
from runtime.memory import Ledger, ModelShape
from runtime.prefill import PrefillHooks, Prefills
from runtime.prefix_tree import Encoding, Row, Segment, StaleEncoding, encode, reuse
from runtime.rollplex import Rollplex
from runtime.vllm_engine import turn_key
from tests.runtime.support import relative_error
from tests.runtime.test_rollplex import run_config

GROUPS, SIZE, TURNS, MAX_TOKENS = 2, 3, 2, 6
HEADER = " ".join(f"rule {number}" for number in range(26))
"""A system prompt of more than one block of vLLM's prefix cache, with which every prompt begins."""
NextPrompt = Callable[[TurnKey, Prompt, Response], Prompt]


def config_of(vision_tower: str) -> RunConfig:
    config = run_config("streamed", vision_tower, reuse_prefill=True)
    return replace(config, runtime=replace(config.runtime, max_model_len=512, microbatch_tokens=512))


@pytest.fixture(scope="module")
def model_dir(model_cache: Path) -> Path:
    return resolve_model("tiny:qwen2_5_vl", model_cache)


@pytest.fixture(scope="module", params=["trained", "frozen"])
def runtime(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Rollplex]:
    config = config_of(request.param)
    with Rollplex(config, model_dir, policy_of(model_dir).vocabulary) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves an idle engine, and nothing on the ledger."""
    yield
    if "runtime" in request.fixturenames:
        runtime: Rollplex = request.getfixturevalue("runtime")
        finish(runtime)
        runtime.reuse_prefill = True
        runtime.use_schedule("streamed")
        runtime.finish_gradients()
        runtime.trainer.gradients.flat.zero_()
        runtime.updater.take_sums()
        runtime._open.clear()


def policy_of(model_dir: Path, context: str = "window") -> VLMPolicy:
    agent = AgentConfig(system_prompt=HEADER, context=context)  # type: ignore[arg-type]
    return VLMPolicy(agent, model_dir, ("left", "right", "forward"))


def observation(*seed: int) -> Observation:
    clip = np.random.default_rng([1 + number for number in seed]).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
    return Observation(clip, "go to the red box")


def root(prompt: Prompt) -> Row:
    return Row((Segment(prompt.token_ids, prompt.positions, media=prompt.media, key=prompt.key),))


def run(steps: Generator[None, None, Encoding]) -> Encoding:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            encoding: Encoding = stop.value
            return encoding


def finish(runtime: Rollplex) -> list[TurnKey]:
    ended = []
    while runtime.has_unfinished():
        ended += [key for key, _ in runtime.poll()]
    return ended


def play(runtime: Rollplex, firsts: list[Prompt], following: NextPrompt) -> list[Group]:
    """Roll out all groups and register each as soon as its last response has ended, while others decode."""
    prompts = {TurnKey(g, r, 0): firsts[g] for g in range(GROUPS) for r in range(SIZE)}
    responses: dict[TurnKey, Response] = {}
    groups: list[Group] = []

    def submit(key: TurnKey) -> None:
        # Unequal lengths, so that groups do not end together.
        runtime.submit(key, prompts[key], Sampling(max_tokens=MAX_TOKENS - 2 * key.group - key.rollout))

    for key in list(prompts):
        submit(key)
    while runtime.has_unfinished():
        for key, response in runtime.poll():
            responses[key] = response
            if key.turn + 1 < TURNS:
                prompts[after := key._replace(turn=key.turn + 1)] = following(key, prompts[key], response)
                submit(after)
                continue
            runtime.end_rollout(key.group, key.rollout)
            if sum(other.group == key.group for other in responses) == SIZE * TURNS:
                groups.append(record(key.group, prompts, responses))
                register(runtime, groups[-1])
    return groups


def record(index: int, prompts: dict[TurnKey, Prompt], responses: dict[TurnKey, Response]) -> Group:
    rollouts = []
    for place in range(SIZE):
        keys = [TurnKey(index, place, turn) for turn in range(TURNS)]
        turns = tuple(Turn(prompts[key], responses[key]) for key in keys)
        rollouts.append(Rollout("e", turns, float(place), success=False, truncated=False))
    return Group(index, tuple(rollouts))


def register(runtime: Rollplex, group: Group) -> None:
    runtime.train_on(group, policy_loss(runtime.config.rl, group, Scale(GROUPS * SIZE)))


def gradients(runtime: Rollplex) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of what was registered, by parameter, and what was counted; both begin anew."""
    runtime.finish_gradients()
    views = runtime.trainer.gradients.views
    names = {parameter: name for name, parameter in runtime.trainer.engine.module.named_parameters()}
    taken = {names[parameter]: view.clone() for parameter, view in views.items()}
    runtime.trainer.gradients.flat.zero_()
    return taken, runtime.updater.take_sums()


def again_without(runtime: Rollplex, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The same rollouts, trained on with nothing from the prefill."""
    for group in groups:
        register(runtime, group)
    return gradients(runtime)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = max(float(gradient.norm()) for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        if float(gradient.norm()) > 1e-5 * scale:  # key biases have no effect: what is left of them is rounding
            assert relative_error(actual[name], gradient) < 1e-4, name
        else:
            assert float(actual[name].norm()) < 1e-4 * scale, name


def window_prompts(model_dir: Path, seed: int) -> tuple[list[Prompt], NextPrompt]:
    """One clip a prompt: a group's first is the same, later ones differ."""
    policy = policy_of(model_dir)

    def following(key: TurnKey, _prompt: Prompt, _response: Response) -> Prompt:
        return policy.render([[observation(seed, *key)]])[0]

    return policy.render([[observation(seed, group)] for group in range(GROUPS)]), following


def history_prompts(model_dir: Path, seed: int) -> tuple[list[Prompt], NextPrompt]:
    """One conversation that grows: a group's first prompt is the same."""
    policy = policy_of(model_dir, "history")
    begun = [observation(seed, group) for group in range(GROUPS)]

    def following(key: TurnKey, prompt: Prompt, response: Response) -> Prompt:
        return policy.render([[begun[key.group], observation(seed, *key)]], [(prompt, response.token_ids)])[0]

    return policy.render([[item] for item in begun]), following


@pytest.mark.parametrize("schedule", ["unshared", "serial", "overlapped", "streamed"])
def test_gradients_are_those_of_the_trainers_own_forward(runtime: Rollplex, model_dir: Path, schedule: str) -> None:
    runtime.use_schedule(schedule)
    firsts, following = window_prompts(model_dir, seed=1)
    groups = play(runtime, firsts, following)
    actual, sums = gradients(runtime)
    expected, plain = again_without(runtime, groups)
    assert_close(actual, expected)
    prompts = {turn.prompt.key: turn.prompt for group in groups for rollout in group.rollouts for turn in rollout.turns}
    assert len(prompts) == GROUPS * (1 + SIZE)
    reused = sum(len(prompt.token_ids) for prompt in prompts.values())
    # Two of the three copies of a first prompt share a row, and one prefill; the third comes too late.
    copies = sum(len(first.token_ids) for first in firsts) if schedule == "unshared" else 0
    assert sums["tokens/reused"] == reused + copies
    assert "tokens/reused" not in plain
    assert sums["train/ratio_max"] == 1.0


def test_a_chain_takes_its_root_alone(runtime: Rollplex, model_dir: Path) -> None:
    runtime.use_schedule("overlapped")
    runtime.packing = replace(runtime.packing, chain=True)
    firsts, following = history_prompts(model_dir, seed=2)
    groups = play(runtime, firsts, following)
    actual, sums = gradients(runtime)
    expected, _ = again_without(runtime, groups)
    assert_close(actual, expected)
    assert sums["tokens/reused"] == sum(len(prompt.token_ids) for prompt in firsts)
    assert sums.get("window/over_budget", 0) == 0  # responses were encoded early, against what came of the prefill


def test_two_prompts_of_one_prefill_are_told_apart_and_equal_the_trainers_encoding(
    runtime: Rollplex, model_dir: Path
) -> None:
    prefills = runtime.updater.prefills
    prompts, _ = window_prompts(model_dir, seed=3)
    for group, prompt in enumerate(prompts):
        runtime.submit(TurnKey(group, 0, 0), prompt, Sampling(max_tokens=2))
    runtime.poll()
    assert all(prefills.holds(root(prompt)) for prompt in prompts)
    leased = sum(runtime.shape.boundary_bytes(len(prompt.token_ids)) for prompt in prompts)
    assert runtime.ledger.used["boundaries"] == leased
    for prompt in prompts:
        expected = run(encode(runtime.actor, row := root(prompt), keep="inputs"))
        taken = prefills.take(row)
        assert taken is not None
        actual = run(reuse(runtime.actor, row, taken.version, taken.inputs, taken.final))
        pairs = [(actual.final, expected.final), *zip(actual.keys, expected.keys, strict=True)]
        pairs += [*zip(actual.values, expected.values, strict=True)]
        pairs += [(a.hidden_in, b.hidden_in) for a, b in zip(actual.layers, expected.layers, strict=True)]
        assert len(pairs) == 1 + 3 * runtime.actor.num_layers
        for own, other in pairs:
            assert own is not None
            assert other is not None
            assert own.shape == other.shape
            assert float((own - other).abs().max()) <= 1e-5 * max(1.0, float(other.abs().max()))
    assert runtime.ledger.used["boundaries"] == 0


def test_keys_and_values_alone_are_those_of_the_whole_layer_to_the_bit(runtime: Rollplex, model_dir: Path) -> None:
    prompts, _ = window_prompts(model_dir, seed=4)
    both = Row(tuple(segment for prompt in prompts for segment in root(prompt).segments))
    encoding = run(encode(runtime.actor, both, keep="inputs"))
    for index, layer in enumerate(encoding.layers):
        keys, values = runtime.actor.keys_values(index, layer.hidden_in, encoding.rotary)
        assert torch.equal(keys, encoding.keys[index])
        assert torch.equal(values, encoding.values[index])


def test_a_cached_prompt_is_computed_whole_for_its_first_request_and_is_no_capture_otherwise(
    runtime: Rollplex, model_dir: Path
) -> None:
    prompt = window_prompts(model_dir, seed=5)[0][0]
    prefills = runtime.updater.prefills
    for _ in range(2):  # the second time all of it is in the prefix cache
        runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=2))
        finish(runtime)
        assert prefills.holds(root(prompt))
        runtime.finish_gradients()
        assert not prefills.holds(root(prompt))
    runtime.engine.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=2))  # reads the cache
    prefills.want(TurnKey(0, 0, 0), prompt)
    finish(runtime)
    assert not prefills.holds(root(prompt))
    assert not prefills.awaits(root(prompt))
    assert runtime.ledger.used["boundaries"] == 0


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_a_prompt_whose_prefill_was_missed_is_encoded(
    runtime: Rollplex, model_dir: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is in the prefix cache, and nobody tells the engine to compute it again."""
    runtime.use_schedule(schedule)
    monkeypatch.setattr(runtime.updater.prefills, "wants", lambda key: False)
    groups = play(runtime, *window_prompts(model_dir, seed=6))
    actual, sums = gradients(runtime)
    expected, _ = again_without(runtime, groups)
    assert "tokens/reused" not in sums
    assert_close(actual, expected)


def test_without_a_budget_nothing_is_captured(
    runtime: Rollplex, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.updater.prefills, "_budget", 0)
    runtime.use_schedule("serial")
    groups = play(runtime, *window_prompts(model_dir, seed=7))
    assert runtime.ledger.used["boundaries"] == 0
    actual, sums = gradients(runtime)
    expected, _ = again_without(runtime, groups)
    assert "tokens/reused" not in sums
    assert sums["window/over_budget"] == GROUPS * (1 + SIZE)
    assert_close(actual, expected)


def test_a_row_of_which_one_prompt_did_not_fit_is_encoded(
    runtime: Rollplex, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts, following = window_prompts(model_dir, seed=8)
    most = max(len(first.token_ids) for first in firsts)
    monkeypatch.setattr(runtime.updater.prefills, "_budget", runtime.shape.boundary_bytes(5 * most // 2))
    runtime.use_schedule("serial")
    groups = play(runtime, firsts, following)
    actual, sums = gradients(runtime)
    expected, _ = again_without(runtime, groups)
    assert 0 < sums["tokens/reused"] < GROUPS * (1 + SIZE) * most
    assert_close(actual, expected)


def test_it_can_be_switched_between_steps(runtime: Rollplex, model_dir: Path) -> None:
    runtime.use_schedule("overlapped")
    for reuse_prefill in (True, False):
        runtime.reuse_prefill = reuse_prefill
        play(runtime, *window_prompts(model_dir, seed=9))
        assert ("tokens/reused" in gradients(runtime)[1]) == reuse_prefill


def test_a_new_version_drops_what_the_old_one_prefilled(runtime: Rollplex, model_dir: Path) -> None:
    prompt = window_prompts(model_dir, seed=10)[0][0]
    row, prefills = root(prompt), runtime.updater.prefills

    def capture() -> None:
        runtime._groups.clear()
        runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=2))
        finish(runtime)

    capture()
    stale = prefills.take(row)
    assert stale is not None
    prefills.drop()
    capture()
    assert prefills.holds(row)
    with torch.no_grad():
        for parameter in runtime.trainer.engine.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.01)
    runtime.vision.forget(runtime.actor.tower)
    runtime._publish()
    assert not prefills.holds(row)
    assert runtime.ledger.used["boundaries"] == 0
    with pytest.raises(StaleEncoding):
        run(reuse(runtime.actor, row, stale.version, stale.inputs, stale.final))
    capture()
    fresh = prefills.take(row)
    assert fresh is not None
    expected = run(encode(runtime.actor, row, keep="inputs"))
    assert expected.final is not None
    assert float((fresh.final - expected.final).abs().max()) <= 1e-5 * float(expected.final.abs().max())
    assert float((stale.final - expected.final).abs().max()) > 1e-3


def test_an_update_reports_what_was_reused(runtime: Rollplex, model_dir: Path) -> None:
    for step in range(2):
        play(runtime, *window_prompts(model_dir, seed=11 + step))
        runtime.update(1e-3)
        stats = runtime.stats()
        assert stats["tokens/reused"] > 0
        assert stats["train/mismatch_logprob_max"] <= 1e-4
        assert runtime.weights_shared_fraction == 1.0


# --- batches that a small engine does not make ---------------------------------------------------------------------


class Layer(nn.Module):
    """Called as vLLM's Qwen2 layers are; adds 1 to the stream, half of it in place."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        stream = hidden if residual is None else residual.add_(hidden)
        return torch.full_like(stream, 0.5), stream.add_(0.5)


class Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + residual, residual


class FakeRunner:
    """A model of two layers, and the books of vLLM's model runner: (request, computed, scheduled, prompt) in tokens."""

    def __init__(self) -> None:
        self.text = SimpleNamespace(layers=[Layer(), Layer()], norm=Norm())

    def get_model(self) -> Any:
        return SimpleNamespace(language_model=SimpleNamespace(model=self.text))

    def run(self, *batch: tuple[str, int, int, int]) -> None:
        scheduled = [item[2] for item in batch]
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *scheduled]))
        self.input_batch = SimpleNamespace(
            req_ids=[item[0] for item in batch],
            num_computed_tokens_cpu=np.array([item[1] for item in batch]),
            num_prompt_tokens=np.array([item[3] for item in batch]),
        )
        with torch.inference_mode():
            hidden, residual = torch.arange(float(sum(scheduled)))[:, None].expand(-1, 2).clone(), None
            for layer in self.text.layers:
                hidden, residual = layer(torch.arange(sum(scheduled)), hidden, residual)
            self.text.norm(hidden, residual)


SHAPE = ModelShape(
    parameters=1, trainable=1, layers=2, hidden=2, intermediate=2, key_value=2, vocabulary=8, item_bytes=4
)


def fakes(**requests: int) -> tuple[FakeRunner, Prefills, dict[str, Row]]:
    """A runner, what is wanted of it, and rows: prompt lengths by request."""
    actor: Any = SimpleNamespace(version=3)
    prefills, runner = Prefills(actor, SHAPE, Ledger(), 1 << 20, {}), FakeRunner()
    PrefillHooks(runner, prefills, turn_key)
    rows = {}
    for place, (name, length) in enumerate(requests.items()):
        prompt = Prompt(tuple(range(length)), torch.arange(length)[None].expand(3, -1), (), name)
        prefills.want(TurnKey(place, 0, 0), prompt)
        rows[name] = root(prompt)
    return runner, prefills, rows


def first_inputs(prefills: Prefills, row: Row) -> list[float]:
    taken = prefills.take(row)
    assert taken is not None
    assert taken.version == 3
    first, second = (torch.cat(parts, dim=1)[0, :, 0] for parts in taken.inputs)
    assert torch.equal(second, first + 1)
    assert not taken.final.is_inference()
    assert taken.final[-1, 0] == first[-1] + 2
    return first.tolist()


def test_rows_are_found_by_the_batch_order_among_decodes() -> None:
    runner, prefills, rows = fakes(a=3, b=2)
    runner.run(("7.0.0-x", 9, 1, 8), ("1.0.0-y", 0, 2, 2), ("8.0.0-z", 0, 2, 2), ("0.0.0-w", 0, 3, 3))
    assert first_inputs(prefills, rows["b"]) == [1.0, 2.0]
    assert first_inputs(prefills, rows["a"]) == [5.0, 6.0, 7.0]


def test_a_part_of_a_prompt_is_not_captured_and_a_later_whole_one_is() -> None:
    runner, prefills, rows = fakes(a=3)
    runner.run(("0.0.0-x", 2, 1, 3))  # from the prefix cache
    runner.run(("0.0.0-x", 0, 2, 3))  # a chunk
    assert not prefills.holds(rows["a"])
    assert prefills.awaits(rows["a"])
    runner.run(("5.0.0-y", 4, 1, 4), ("0.0.0-x", 0, 5, 3))  # preempted after two tokens and computed again
    assert first_inputs(prefills, rows["a"]) == [1.0, 2.0, 3.0]


def test_a_prompt_computed_twice_is_captured_once() -> None:
    runner, prefills, rows = fakes(a=3)
    runner.run(("0.0.0-x", 0, 3, 3))
    runner.run(("5.0.0-y", 4, 1, 4), ("0.0.0-x", 0, 4, 3))
    assert first_inputs(prefills, rows["a"]) == [0.0, 1.0, 2.0]
    assert prefills.take(rows["a"]) is None


def test_what_is_taken_of_a_row_is_whole_or_nothing() -> None:
    runner, prefills, rows = fakes(a=3, b=2, c=2)
    runner.run(("0.0.0-x", 0, 3, 3), ("1.0.0-y", 0, 2, 2))
    both = Row((*rows["b"].segments, *rows["a"].segments, *rows["b"].segments))
    assert first_inputs(prefills, both) == [3.0, 4.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    runner, prefills, rows = fakes(a=3, b=2)
    runner.run(("0.0.0-x", 0, 3, 3))
    assert prefills.take(Row((*rows["a"].segments, *rows["b"].segments))) is None
    assert not prefills.holds(rows["a"])
    prefills._ledger.check_integrity(empty=("boundaries",))
