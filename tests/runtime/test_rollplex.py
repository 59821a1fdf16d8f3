"""The whole runtime: real vLLM, real DeepSpeed, one storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import (
    AgentConfig,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    TrainConfig,
)
from data.types import Group, Prompt, Response, Rollout, Sampling, Turn, TurnKey
from rl.losses import Scale, policy_loss
from runtime.lane import InlineLane
from runtime.memory import HBMExhausted
from runtime.overlap import Load
from runtime.prefix_tree import StaleEncoding
from runtime.rollplex import Rollplex
from runtime.tracing import TIMELINE
from runtime.vllm_engine import StaleCache
from runtime.window import Job

GROUPS, SIZE, TURNS = 2, 3, 2


def run_config(
    schedule: str = "overlapped", vision_tower: str = "trained", deterministic: bool = False, **runtime: Any
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="tiny:qwen2_5_vl"),
        rollout=RolloutConfig(max_tokens=6, deterministic=deterministic),
        rl=RLConfig(group_size=SIZE, groups_per_step=GROUPS, kl_coef=0.1),
        train=TrainConfig(lr=1e-3, vision_tower=vision_tower),  # type: ignore[arg-type]
        runtime=RuntimeConfig(schedule=schedule, fallback=False, microbatch_tokens=64, max_model_len=128, **runtime),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def policy(model_cache: Path) -> VLMPolicy:
    return VLMPolicy(AgentConfig(), resolve_model("tiny:qwen2_5_vl", model_cache), ("left", "right", "forward"))


def make_runtime(model_cache: Path, policy: VLMPolicy, config: RunConfig) -> Rollplex:
    return Rollplex(config, resolve_model(config.model.path, model_cache), policy.vocabulary)


def prompts_of(policy: VLMPolicy, seed: int) -> dict[TurnKey, Prompt]:
    """Prompts of every turn; the first is the same for a whole group."""
    generator = np.random.default_rng(seed)
    keys = [TurnKey(g, r, t) for g in range(GROUPS) for r in range(SIZE) for t in range(TURNS)]
    clips = {key: generator.integers(0, 255, (4, 56, 56, 3), dtype=np.uint8) for key in keys}
    for key in keys:
        if key.turn == 0:
            clips[key] = clips[TurnKey(key.group, 0, 0)]
    rendered = policy.render([[Observation(clips[key], "go to the red box")] for key in keys])
    prompts = dict(zip(keys, rendered, strict=True))
    return {key: prompts[TurnKey(key.group, 0, 0)] if key.turn == 0 else prompts[key] for key in keys}


def roll_out(runtime: Rollplex, prompts: dict[TurnKey, Prompt], greedy: bool = False) -> dict[TurnKey, Response]:
    """All turns, each rollout's next one when its last has ended."""
    sampling = Sampling(max_tokens=6, temperature=0.0 if greedy else 1.0)
    for key, prompt in prompts.items():
        if key.turn == 0:
            runtime.submit(key, prompt, sampling)
    responses: dict[TurnKey, Response] = {}
    while runtime.has_unfinished():
        for key, response in runtime.poll():
            responses[key] = response
            following = key._replace(turn=key.turn + 1)
            if following in prompts:
                runtime.submit(following, prompts[following], sampling)
            else:
                runtime.end_rollout(key.group, key.rollout)
    return responses


def record(prompts: dict[TurnKey, Prompt], responses: dict[TurnKey, Response]) -> list[Group]:
    return [record_group(group, prompts, responses) for group in range(GROUPS)]


def record_group(group: int, prompts: dict[TurnKey, Prompt], responses: dict[TurnKey, Response]) -> Group:
    """A group with made-up rewards: the share of even tokens."""
    rollouts = []
    for index in range(SIZE):
        keys = [TurnKey(group, index, turn) for turn in range(TURNS)]
        turns = tuple(Turn(prompts[key], responses[key]) for key in keys)
        tokens = [token for key in keys for token in responses[key].token_ids]
        reward = sum(token % 2 == 0 for token in tokens) / len(tokens) + 0.01 * index
        rollouts.append(Rollout(f"episode {group}", turns, reward, success=False, truncated=False))
    return Group(group, tuple(rollouts))


def train(runtime: Rollplex, groups: list[Group], order: Sequence[int] = ()) -> dict[str, float]:
    for group in groups:
        runtime.train_on(group, policy_loss(runtime.config.rl, group, Scale(12)))
    runtime.update(1e-3, order)
    return runtime.stats()


def weights(runtime: Rollplex) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in runtime.trainer.engine.module.named_parameters()}


@pytest.fixture(scope="module")
def runtime(model_cache: Path, policy: VLMPolicy) -> Iterator[Rollplex]:
    with make_runtime(model_cache, policy, run_config()) as runtime:
        yield runtime


def test_vllm_and_trainer_agree_at_every_step_on_one_storage(runtime: Rollplex, policy: VLMPolicy) -> None:
    for step in range(3):
        prompts = prompts_of(policy, seed=step)
        stats = train(runtime, record(prompts, roll_out(runtime, prompts)))
        assert stats["train/mismatch_logprob_max"] <= 1e-4
        assert stats["train/mismatch_logprob_mean"] <= 1e-6
        assert stats["train/mismatch_prob"] <= 1e-6
        assert stats["train/ratio_max"] == 1.0
        assert (stats["train/kl_sum"] == 0.0) == (step == 0)
        assert stats["window/hidden_s"] > 0
        assert stats["tokens/naive"] > stats["tokens/trained"]
        assert runtime.weights_shared_fraction == 1.0
    assert runtime.policy_version == 3


def test_a_changed_vision_tower_changes_the_answer_after_publish(runtime: Rollplex, policy: VLMPolicy) -> None:
    prompt = prompts_of(policy, seed=9)[TurnKey(0, 0, 0)]

    def answer() -> Response:
        runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=6, temperature=0.0), train=False)
        while runtime.has_unfinished():
            for _, response in runtime.poll():
                return response
        raise AssertionError("no response")

    before = answer()
    assert answer() == before
    with torch.no_grad():
        for name, parameter in runtime.trainer.engine.module.named_parameters():
            if "visual" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    runtime._publish()
    after = answer()
    assert after.policy_version == before.policy_version + 1
    differences = [abs(a - b) for a, b in zip(before.behaviour_logprobs, after.behaviour_logprobs, strict=False)]
    assert max(differences) > 1e-3


def test_forbidden_tokens_are_never_sampled(runtime: Rollplex, policy: VLMPolicy) -> None:
    prompts = prompts_of(policy, seed=5)
    sampled = {token for response in roll_out(runtime, prompts).values() for token in response.token_ids}
    assert not sampled & set(policy.vocabulary.forbidden)
    runtime._groups.clear()


def test_a_version_is_not_published_while_responses_decode(runtime: Rollplex, policy: VLMPolicy) -> None:
    prompt = prompts_of(policy, seed=6)[TurnKey(0, 0, 0)]
    runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=6), train=False)
    with pytest.raises(StaleCache, match="still decode"):
        runtime.engine.publish(runtime.policy_version + 1)
    before = weights(runtime)
    with pytest.raises(StaleCache, match="still decode"):
        runtime.update(1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(runtime).items())
    while runtime.has_unfinished():
        runtime.poll()


def test_a_prompt_that_does_not_fit_names_the_knob(runtime: Rollplex, policy: VLMPolicy) -> None:
    prompt = prompts_of(policy, seed=6)[TurnKey(0, 0, 0)]
    with pytest.raises(ValueError, match=r"runtime\.max_model_len=128"):
        runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=120), train=False)


def test_update_without_groups_is_refused(runtime: Rollplex) -> None:
    with pytest.raises(ValueError, match="train_on"):
        runtime.update(1e-3)


class ReplayEngine:
    """Answers from a record instead of sampling; a response takes as many steps as it has tokens."""

    def __init__(self, responses: dict[TurnKey, Response]) -> None:
        self.responses = responses
        self.asleep = False
        self.left: dict[TurnKey, int] = {}

    def submit(self, key: TurnKey, prompt: Prompt, sampling: Sampling, features: Any) -> None:
        self.left[key] = len(self.responses[key].token_ids)

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self, while_decoding: Callable[[], None]) -> list[tuple[TurnKey, Response]]:
        while_decoding()
        self.left = {key: steps - 1 for key, steps in self.left.items()}
        ended = [key for key, steps in self.left.items() if steps <= 0]
        for key in ended:
            del self.left[key]
        return [(key, self.responses[key]) for key in ended]

    def load(self) -> Load:
        return Load(len(self.left), 0)

    def check_idle(self) -> None:
        assert not self.left

    def sleep(self) -> bool:
        return False

    def publish(self, policy_version: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def recorded(policy: VLMPolicy) -> tuple[dict[TurnKey, Prompt], dict[TurnKey, Response]]:
    prompts = prompts_of(policy, seed=1)
    generator = np.random.default_rng(0)
    responses = {}
    for key in prompts:
        token_ids = tuple(generator.integers(0, 200, generator.integers(1, 7)).tolist())
        responses[key] = Response(token_ids, (-1.0,) * len(token_ids), "stop", 0)
    return prompts, responses


def replay(model_cache: Path, policy: VLMPolicy, config: RunConfig, recorded: Any, *, live: bool = True) -> Rollplex:
    """One update on the recorded rollouts, played again step by step or handed over whole."""
    prompts, responses = recorded
    runtime = make_runtime(model_cache, policy, config)
    if live:
        runtime._engine = ReplayEngine(responses)  # type: ignore[assignment]
        assert roll_out(runtime, prompts) == responses
    train(runtime, record(prompts, responses))
    return runtime


def test_when_work_runs_does_not_change_a_bit(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    serial = replay(model_cache, policy, run_config("serial"), recorded)
    expected, stats = weights(serial), serial.stats()
    assert stats["window/hidden_s"] < 1e-3
    for config in (
        run_config("overlapped"),
        run_config("overlapped", backlog=1),
        run_config("overlapped", backlog=16),
        run_config("overlapped", boundary_budget_bytes=0),
        run_config("streamed"),
    ):
        other = replay(model_cache, policy, config, recorded)
        assert other.stats()["train/loss"] == stats["train/loss"]
        assert other.stats()["train/grad_norm"] == stats["train/grad_norm"]
        for name, tensor in weights(other).items():
            assert torch.equal(tensor, expected[name]), (config.runtime, name)
        assert other.stats()["window/hidden_s"] > 0
    whole = replay(model_cache, policy, run_config("serial"), recorded, live=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(whole).items())


class SlowDevice(InlineLane):
    """A device whose decode steps are done when they have been asked about so often; work is done at once."""

    concurrent = True

    def __init__(self, polls: int) -> None:
        super().__init__()
        self.polls = polls
        self.decoding = False
        self.during: list[str] = []
        """Quanta handed out during decode, by `place/kind`."""

    @contextmanager
    def decode(self) -> Iterator[None]:
        self.decoding = True
        yield
        self.decoding = False

    def decoded(self) -> Callable[[], bool]:
        left = iter(range(self.polls))
        return lambda: next(left, None) is None

    @contextmanager
    def work(self, name: str, *, alone: bool = False) -> Iterator[None]:
        assert not (alone and self.decoding)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        if self.decoding:
            self.during.append(name)
        with super().work(name, alone=alone):
            yield


def use_lane(runtime: Rollplex, lane: InlineLane) -> None:
    runtime.lane = runtime.window.lane = lane


def play_uneven(runtime: Rollplex, prompts: dict[TurnKey, Prompt]) -> dict[TurnKey, Response]:
    """Sample responses of which group 0's are short, and register each group while others decode."""
    samplings = [Sampling(max_tokens=2, min_tokens=2), Sampling(max_tokens=16, min_tokens=16)]
    responses: dict[TurnKey, Response] = {}
    for key, prompt in prompts.items():
        if key.turn == 0:
            runtime.submit(key, prompt, samplings[key.group])
    while runtime.has_unfinished():
        for key, responses[key] in runtime.poll():
            following = key._replace(turn=key.turn + 1)
            if following in prompts:
                runtime.submit(following, prompts[following], samplings[key.group])
                continue
            runtime.end_rollout(key.group, key.rollout)
            if sum(other.group == key.group for other in responses) == SIZE * TURNS:
                group = record_group(key.group, prompts, responses)
                runtime.train_on(group, policy_loss(runtime.config.rl, group, Scale(12)))
    return responses


@pytest.mark.parametrize("reuse_prefill", [False, True])
def test_quanta_during_decode_change_no_token_and_no_weight(
    model_cache: Path, policy: VLMPolicy, reuse_prefill: bool
) -> None:
    def play(polls: int) -> tuple[list[dict[TurnKey, Response]], dict[str, torch.Tensor], list[str]]:
        """Two steps that sample; their responses, the weights after them, and what ran during decode."""
        lane, played = SlowDevice(polls), []
        with make_runtime(model_cache, policy, run_config("streamed", reuse_prefill=reuse_prefill)) as runtime:
            use_lane(runtime, lane)
            for step in range(2):
                prompts = prompts_of(policy, seed=step)
                played.append(play_uneven(runtime, prompts))
                runtime.update(1e-3)
                assert runtime.stats()["window/hidden_s"] > 0
            return played, weights(runtime), lane.during

    after, expected, nothing = play(polls=0)
    during, changed, quanta = play(polls=4)
    assert nothing == []
    kinds = ("actor_prefix", "reference_prefix", "reference_score", "train")
    assert {f"beside/{kind}" for kind in kinds} <= set(quanta)
    assert during == after
    assert all(torch.equal(tensor, expected[name]) for name, tensor in changed.items())


def test_a_jobs_error_during_decode_is_the_polls(model_cache: Path, policy: VLMPolicy) -> None:
    def fails() -> Generator[None, None, None]:
        yield
        raise HBMExhausted("no room")

    with make_runtime(model_cache, policy, run_config("streamed")) as runtime:
        use_lane(runtime, SlowDevice(polls=4))
        prompt = prompts_of(policy, seed=0)[TurnKey(0, 0, 0)]
        runtime.submit(TurnKey(0, 0, 0), prompt, Sampling(max_tokens=6, min_tokens=6), train=False)
        runtime.window._counts["idle/train"] = 1  # no quantum of the kind is to be timed alone
        runtime.window.add(Job("train", fails()))
        with pytest.raises(HBMExhausted, match="no room"):
            runtime.poll()
        ended = [response for _ in range(5) for _, response in runtime.poll()]
        assert [len(response.token_ids) for response in ended] == [6], "the step itself was whole"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_zero_stage_makes_the_same_step(model_cache: Path, policy: VLMPolicy, recorded: Any, stage: int) -> None:
    expected = weights(replay(model_cache, policy, run_config(), recorded))
    other = replay(model_cache, policy, run_config(zero_stage=stage), recorded)
    for name, tensor in weights(other).items():
        assert float((tensor - expected[name]).abs().max()) <= 1e-6, name


def test_in_bfloat16_stage_1_makes_the_step_of_stage_2(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    def trained(stage: int) -> dict[str, torch.Tensor]:
        config = run_config("serial", zero_stage=stage)
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
        return weights(replay(model_cache, policy, config, recorded))

    expected = trained(2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained(1).items())


def test_a_response_of_an_older_version_is_refused(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    prompts, responses = recorded
    runtime = make_runtime(model_cache, policy, run_config())
    runtime.policy_version = 4
    runtime._engine = ReplayEngine(responses)  # type: ignore[assignment]
    with pytest.raises(StaleEncoding, match="sampled by version 0, now is 4"):
        roll_out(runtime, prompts)


def test_second_epoch_clips_against_the_first_ones_logprobs(
    model_cache: Path, policy: VLMPolicy, recorded: Any
) -> None:
    prompts, responses = recorded
    runtime = make_runtime(model_cache, policy, run_config())
    groups = record(prompts, responses)
    assert train(runtime, groups)["train/ratio_max"] == 1.0
    assert train(runtime, groups)["train/ratio_max"] != 1.0


def test_saved_state_continues_to_the_bit(model_cache: Path, policy: VLMPolicy, recorded: Any, tmp_path: Path) -> None:
    responses = recorded[1]
    next_prompts = prompts_of(policy, seed=2)
    runtime = replay(model_cache, policy, run_config(), recorded)
    runtime.save(tmp_path)
    expected_stats = train(runtime, record(next_prompts, responses))
    expected = weights(runtime)
    resumed = make_runtime(model_cache, policy, run_config())
    for prompt in next_prompts.values():
        resumed.features(prompt)  # of weights that are about to be replaced
    resumed.load(tmp_path)
    assert resumed.policy_version == 1
    stats = train(resumed, record(next_prompts, responses))
    assert stats["train/loss"] == expected_stats["train/loss"]
    assert stats["train/kl_sum"] == expected_stats["train/kl_sum"] > 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_a_plan_that_does_not_fit_stops_before_the_model_loads(model_cache: Path, policy: VLMPolicy) -> None:
    with pytest.raises(HBMExhausted, match=r"runtime\."):
        make_runtime(model_cache, policy, run_config(hbm_bytes=1 << 20))


def test_a_frozen_tower_sees_each_clip_once(model_cache: Path, policy: VLMPolicy) -> None:
    with make_runtime(model_cache, policy, run_config(vision_tower="frozen")) as runtime:
        prompts = prompts_of(policy, seed=0)
        stats = train(runtime, record(prompts, roll_out(runtime, prompts)))
        # Rollout, reference and actor; a group's first prompt is one clip.
        assert runtime.vision.computed == len({prompt.key for prompt in prompts.values()}) == GROUPS * (1 + SIZE)
        assert stats["train/mismatch_logprob_max"] <= 1e-4
        assert stats["train/kl_sum"] == 0.0
        assert runtime.weights_shared_fraction == 1.0
        assert runtime.updater.reference is not None
        assert runtime.updater.reference.tower is runtime.actor.tower
        assert runtime.ledger.used["reference"] == 4 * runtime.shape.trainable


def test_a_trained_tower_sees_each_clip_once_a_version(model_cache: Path, policy: VLMPolicy) -> None:
    with make_runtime(model_cache, policy, run_config(vision_tower="trained")) as runtime:
        prompts = prompts_of(policy, seed=0)
        for step in (1, 2):
            before = runtime.vision.computed
            stats = train(runtime, record(prompts, roll_out(runtime, prompts)))
            # Rollout and actor share a version's features; the reference's tower is another and stays what it is.
            assert runtime.vision.computed - before == GROUPS * (1 + SIZE) * (2 if step == 1 else 1)
            assert stats["train/mismatch_logprob_max"] <= 1e-4
            assert (stats["train/kl_sum"] == 0.0) == (step == 1)
            assert stats["train/ratio_max"] == 1.0


def stream(runtime: Rollplex, prompts: dict[TurnKey, Prompt], responses: dict[TurnKey, Response]) -> None:
    """Roll out, and register each group as soon as its last response has ended, while others decode."""
    runtime._engine = ReplayEngine(responses)  # type: ignore[assignment]
    groups = record(prompts, responses)
    sampling = Sampling(max_tokens=6)
    left = dict.fromkeys(range(GROUPS), SIZE * TURNS)
    for key, prompt in prompts.items():
        if key.turn == 0:
            runtime.submit(key, prompt, sampling)
    while runtime.has_unfinished():
        for key, _ in runtime.poll():
            following = key._replace(turn=key.turn + 1)
            if following in prompts:
                runtime.submit(following, prompts[following], sampling)
            else:
                runtime.end_rollout(key.group, key.rollout)
            left[key.group] -= 1
            if not left[key.group]:
                group = groups[key.group]
                runtime.train_on(group, policy_loss(runtime.config.rl, group, Scale(12)))


@pytest.fixture(scope="module")
def late_first(recorded: Any) -> tuple[dict[TurnKey, Prompt], dict[TurnKey, Response]]:
    """Recorded rollouts of which group 1 ends long before group 0."""
    prompts, responses = recorded
    lengths = {0: 6, 1: 2}
    return prompts, {
        key: Response((key.rollout + 1,) * lengths[key.group], (-1.0,) * lengths[key.group], "stop", 0)
        for key in responses
    }


def test_streamed_order_is_recorded_and_serial_repeats_its_bits(
    model_cache: Path, policy: VLMPolicy, late_first: Any
) -> None:
    prompts, responses = late_first
    streamed = make_runtime(model_cache, policy, run_config("streamed"))
    stream(streamed, prompts, responses)
    streamed.update(1e-3)
    assert streamed.train_order == (1, 0)
    assert streamed.stats()["window/blocked_s"] < 1e-2
    serial = make_runtime(model_cache, policy, run_config("serial"))
    train(serial, record(prompts, responses), order=streamed.train_order)
    assert serial.train_order == (1, 0)
    expected = weights(streamed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(serial).items())


def test_streamed_waits_for_index_order_where_runs_must_repeat(
    model_cache: Path, policy: VLMPolicy, late_first: Any
) -> None:
    prompts, responses = late_first
    runtime = make_runtime(model_cache, policy, run_config("streamed", deterministic=True))
    stream(runtime, prompts, responses)
    runtime.update(1e-3)
    assert runtime.train_order == (0, 1)
    assert runtime.stats()["window/blocked_s"] > 0
    serial = make_runtime(model_cache, policy, run_config("serial"))
    train(serial, record(prompts, responses))
    expected = weights(runtime)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(serial).items())


@pytest.mark.slow
def test_twenty_steps_streamed_equal_twenty_steps_serial(model_cache: Path, policy: VLMPolicy, recorded: Any) -> None:
    prompts, responses = recorded
    runtimes = [
        make_runtime(model_cache, policy, run_config(name, deterministic=True)) for name in ("serial", "streamed")
    ]
    for step in range(20):
        now = {key: replace(response, policy_version=step) for key, response in responses.items()}
        for runtime in runtimes:
            stream(runtime, prompts, now)
            runtime.update(1e-3)
    expected = weights(runtimes[0])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(runtimes[1]).items())


def test_timeline_has_a_lane_for_decoding_and_each_kind_of_job(
    model_cache: Path, policy: VLMPolicy, recorded: Any, tmp_path: Path
) -> None:
    TIMELINE.recording = True
    try:
        runtime = make_runtime(model_cache, policy, run_config("streamed"))
        stream(runtime, *recorded)
        runtime.update(1e-3)
        TIMELINE.write(tmp_path / "trace.json")
    finally:
        TIMELINE.recording = False
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"decode", "actor_prefix", "reference_prefix", "reference_score", "train", "optimizer"} <= lanes
    decode = [event for event in events if event["ph"] == "X" and event["cat"] == "decode"]
    jobs = [event for event in events if event["ph"] == "X" and event["name"].startswith("job_")]
    assert min(event["ts"] for event in jobs) < max(event["ts"] for event in decode), "no job ran before the last token"
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
