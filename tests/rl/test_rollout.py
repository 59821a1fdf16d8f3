"""The episode loop: nothing is lost, rules hold, and what should not depend on timing does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from configs.errors import UserError
from configs.schema import RunConfig
from data.task_sampler import Task, TaskSampler
from data.types import Group, Sampling, TurnKey
from envs.registration import Episode
from rl.players import ModelPlayer, ScriptedPlayer, expert_choice
from rl.rollout import Lost, collect_expert, collect_groups, rollout_sampling, run_episodes
from tests.rl.fakes import ACTIONS, GO, NONSENSE, STAY, FakePolicy, FakePool, FakeRuntime, fake_config


def some_length(episode: Episode) -> int:
    return 1 + episode.seed % 4


def seeded_answer(key: TurnKey, sampling: Sampling) -> int:
    assert sampling.seed is not None
    return (GO, STAY, NONSENSE)[sampling.seed % 3]


def tasks(count: int) -> list[tuple[int, Task]]:
    return list(enumerate(TaskSampler(0).next(count)))


def collect(config: RunConfig, pool: FakePool, runtime: FakeRuntime, count: int = 3, step: int = 0) -> list[Group]:
    groups = list(collect_groups(tasks(count), pool, FakePolicy(), runtime, config, step))
    pool.check_integrity()
    runtime.check_integrity()
    return groups


def summary(groups: Sequence[Group]) -> list[object]:
    """Everything of the groups that can be compared."""
    return [
        (
            group.index,
            [(r.reward, r.success, r.truncated, r.episode_id, [t.actions for t in r.turns]) for r in group.rollouts],
        )
        for group in groups
    ]


@pytest.mark.parametrize("timing", range(20))
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_rollout_is_accounted_for(timing: int, deterministic: bool) -> None:
    config = fake_config(rollout={"deterministic": deterministic})
    pool = FakePool(1 + timing % 7, some_length, timing=timing)  # fewer slots than the 12 rollouts
    answers = (GO, STAY, NONSENSE, GO)
    runtime = FakeRuntime(lambda key, _: answers[(key.rollout + key.turn) % 4], timing=timing)
    groups = collect(config, pool, runtime)

    assert sorted(group.index for group in groups) == [0, 1, 2]
    places = [(group.index, row) for group in groups for row in range(len(group.rollouts))]
    assert sorted(places) == sorted(runtime.ended_rollouts) == [(g, r) for g in range(3) for r in range(4)]
    turns = [TurnKey(g.index, row, t) for g in groups for row, r in enumerate(g.rollouts) for t in range(len(r.turns))]
    assert sorted(turns) == sorted(key for key, _, _ in runtime.submitted)
    assert pool.events.count(("reset", 0)) + sum(e[0] == "reset" and e[1] > 0 for e in pool.events) == 12
    for group in groups:
        task = dict(tasks(3))[group.index]
        needed = some_length(Episode("", task.seed, "train"))
        for row, rollout in enumerate(group.rollouts):
            told = [answers[(row + turn) % 4] for turn in range(len(rollout.turns))]
            assert rollout.success == (told.count(GO) == needed)
            assert rollout.truncated == (not rollout.success)
            assert [turn.invalid for turn in rollout.turns] == [answer == NONSENSE for answer in told]
            assert rollout.reward == pytest.approx(rollout.success - 0.125 * (len(told) - rollout.success))


def test_a_group_is_handed_over_while_others_are_still_played() -> None:
    pool, runtime = FakePool(8, lambda episode: 1 if episode.seed == tasks(2)[0][1].seed else 6), FakeRuntime()
    groups = collect_groups(tasks(2), pool, FakePolicy(), runtime, fake_config(), 0)
    assert next(groups).index == 0
    assert len(runtime.ended_rollouts) == 4
    assert next(groups).index == 1


def test_episodes_go_on_while_one_simulator_is_slow() -> None:
    pool, runtime = FakePool(4, lambda episode: 3), FakeRuntime()
    pool.slow_slots[2] = 200
    collect(fake_config(), pool, runtime, count=1)
    assert runtime.ended_rollouts[-1] == (0, 2)
    assert pool.events.index(("step", 2)) > max(i for i, event in enumerate(pool.events) if event[1] != 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_runtime_works_on_while_simulators_step(deterministic: bool) -> None:
    pool, runtime = FakePool(4, lambda episode: 3), FakeRuntime()
    pool.slow_slots = dict.fromkeys(range(4), 100)  # nothing decodes for a hundred polls of the pool
    collect(fake_config(rollout={"deterministic": deterministic}), pool, runtime, count=1)
    assert runtime.num_polls > 100


@pytest.mark.parametrize("num_envs", [3, 12, 50])
def test_deterministic_order_and_records_do_not_depend_on_timing(num_envs: int) -> None:
    config = fake_config(rollout={"deterministic": True})
    seen = []
    for timing in range(5):
        pool, runtime = FakePool(num_envs, some_length, timing=timing), FakeRuntime(seeded_answer, timing=timing)
        groups = collect(config, pool, runtime, step=7)
        seen.append((summary(groups), runtime.submitted, runtime.ended_rollouts, pool.events))
    assert all(run == seen[0] for run in seen)


def test_deterministic_waves_are_in_index_order() -> None:
    runtime = FakeRuntime(timing=3)
    collect(fake_config(rollout={"deterministic": True}), FakePool(12, lambda episode: 2, timing=4), runtime)
    keys = [key for key, _, _ in runtime.submitted]
    assert keys == [TurnKey(group, rollout, turn) for turn in range(2) for group in range(3) for rollout in range(4)]


def test_seeds_tell_every_place_and_step_apart() -> None:
    sampling = rollout_sampling(fake_config(rollout={"deterministic": True}), 0)
    later = rollout_sampling(fake_config(rollout={"deterministic": True}), 1)
    other = rollout_sampling(fake_config(rollout={"deterministic": True}, seed=1), 0)
    keys = [TurnKey(group, rollout, turn) for group in range(5) for rollout in range(5) for turn in range(5)]
    seeds = [chosen(key).seed for chosen in (sampling, later, other) for key in keys]
    assert len(set(seeds)) == 3 * 125
    assert rollout_sampling(fake_config(), 0)(keys[0]).seed is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_rollouts_that_start_from_different_states_are_refused(deterministic: bool) -> None:
    pool = FakePool(12, lambda episode: 2)
    pool.start_hash = lambda slot, episode: "odd" if slot == 6 else "even"
    with pytest.raises(UserError, match=r"group 1, episode 'train-\d+': rollout \d .*(odd and even|even and odd)"):
        collect(fake_config(rollout={"deterministic": deterministic}), pool, FakeRuntime())


def test_an_episode_that_never_ends_is_cut_and_counted_as_a_failure() -> None:
    # D15: the environment never says done, the policy answers nonsense for ever.
    pool, runtime = FakePool(4, lambda episode: 10**9), FakeRuntime(lambda key, sampling: NONSENSE)
    (group,) = collect(fake_config(env={"max_turns": 5}), pool, runtime, count=1)
    for rollout in group.rollouts:
        assert (len(rollout.turns), rollout.truncated, rollout.success) == (5, True, False)
        assert all(turn.invalid and turn.actions == () for turn in rollout.turns)
        assert rollout.info["env_steps"] == 5


def test_a_goal_reached_on_the_last_turn_is_a_success() -> None:
    (group,) = collect(fake_config(env={"max_turns": 3}), FakePool(4, lambda episode: 3), FakeRuntime(), count=1)
    assert all(rollout.success and not rollout.truncated and len(rollout.turns) == 3 for rollout in group.rollouts)


def test_an_invalid_response_may_end_the_episode() -> None:
    config = fake_config(agent={"invalid_action": "terminate"})
    runtime = FakeRuntime(lambda key, sampling: NONSENSE if key == TurnKey(0, 2, 1) else GO)
    (group,) = collect(config, FakePool(2, lambda episode: 3), runtime, count=1)
    assert [rollout.success for rollout in group.rollouts] == [True, True, False, True]
    failed = group.rollouts[2]
    assert (len(failed.turns), failed.truncated, failed.reward) == (2, False, -0.125)


def test_the_history_holds_the_last_clips_and_the_actions_between() -> None:
    policy = FakePolicy()
    config = fake_config(agent={"context_clips": 2}, rl={"group_size": 2})
    answers = (GO, STAY, GO, GO)
    runtime = FakeRuntime(lambda key, sampling: answers[key.turn])
    list(collect_groups(tasks(1), FakePool(1, lambda episode: 3), policy, runtime, config, 0))
    seen = [[(int(o.clip[0, 0, 0, 0]), o.actions) for o in history] for history in policy.histories[:4]]
    assert seen == [
        [(0, ())],
        [(0, ()), (1, ("go",))],
        [(1, ("go",)), (1, ("stay",))],
        [(1, ("stay",)), (2, ("go",))],
    ]


def test_no_tasks_give_no_groups() -> None:
    assert collect(fake_config(), FakePool(2, some_length), FakeRuntime(), count=0) == []


def test_a_stop_ends_the_loop_between_two_decode_steps() -> None:
    pool, runtime = FakePool(4, lambda episode: 10**9), FakeRuntime()
    groups = collect_groups(
        tasks(1), pool, FakePolicy(), runtime, fake_config(env={"max_turns": 10**9}), 0,
        should_stop=lambda: runtime.num_polls >= 7,
    )  # fmt: skip
    assert list(groups) == []
    assert runtime.num_polls == 7


def test_evaluation_plays_each_episode_once_and_keeps_nothing_for_training() -> None:
    runtime, pool = FakeRuntime(timing=2), FakePool(3, some_length, timing=1)
    episodes = [(index, Episode(f"held-{index}", index, "heldout")) for index in (1, 4, 7, 8)]
    player = ModelPlayer(FakePolicy(), runtime, lambda key: Sampling(4, 0.0), train=False)
    records = run_episodes(episodes, pool, player, fake_config())
    assert {index: record.episode_id for index, record in records.items()} == {i: f"held-{i}" for i in (1, 4, 7, 8)}
    assert [len(records[index].turns) for index in (1, 4, 7, 8)] == [2, 1, 4, 1]
    assert not runtime.ended_rollouts
    assert all(not train and sampling.temperature == 0 for _, sampling, train in runtime.submitted)


def test_expert_labels_stay_right_where_noise_acts() -> None:
    runs = []
    for timing in range(3):
        config = fake_config(env={"max_turns": 40}, imitation={"noise": 0.5, "episodes_per_step": 9})
        (group,) = collect_expert(tasks(9), FakePool(4, lambda episode: 9, timing=timing), FakePolicy(), config, 0)
        runs.append([[turn.actions for turn in rollout.turns] for rollout in group.rollouts])
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    assert all(turn.response.token_ids == (GO,) for turn in turns)
    assert all(logprob != logprob for turn in turns for logprob in turn.response.behaviour_logprobs)
    strayed = sum(turn.actions == ("stay",) for turn in turns)  # half of the turns draw, half of those "stay"
    assert 0.1 < strayed / len(turns) < 0.4
    assert all(rollout.success for rollout in group.rollouts)
    assert runs[0] == runs[1] == runs[2]


def test_mistakes_of_the_teacher_are_carried_out_and_imitated() -> None:
    config = fake_config(env={"max_turns": 40}, imitation={"mistakes": 0.5, "episodes_per_step": 9})
    (group,) = collect_expert(tasks(9), FakePool(4, lambda episode: 9), FakePolicy(), config, 0)
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    strayed = [turn for turn in turns if turn.actions == ("stay",)]  # half of the turns draw, half of those "stay"
    assert 0.1 < len(strayed) / len(turns) < 0.4
    assert all((turn.response.token_ids == (GO,)) == (turn.actions == ("go",)) for turn in turns)


def test_without_noise_the_expert_is_followed() -> None:
    (group,) = collect_expert(tasks(3), FakePool(2, some_length), FakePolicy(), fake_config(), 0)
    assert len(group.rollouts) == 3
    assert all(turn.actions == ("go",) for rollout in group.rollouts for turn in rollout.turns)
    assert collect_expert([], FakePool(2, some_length), FakePolicy(), fake_config(), 0) == []


def test_an_expert_needs_no_model() -> None:
    player = ScriptedPlayer(expert_choice(ACTIONS), None)
    records = run_episodes([(0, Episode("a", 3, "heldout"))], FakePool(1, some_length), player, fake_config())
    assert records[0].success
    assert records[0].turns[0].response.token_ids == ()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_group_with_a_lost_episode_leaves_the_batch_and_the_others_stay(deterministic: bool, at: int) -> None:
    config = fake_config(rollout={"deterministic": deterministic})
    gone = tasks(3)[1][1].seed
    pool, runtime, lost = FakePool(12, lambda episode: 3, timing=1), FakeRuntime(timing=2), list[Lost]()
    pool.loses = lambda slot, episode, went: episode.seed == gone and slot == 6 and went == at
    groups = list(collect_groups(tasks(3), pool, FakePolicy(), runtime, config, 0, lost=lost))
    pool.check_integrity()
    runtime.check_integrity()
    assert sorted(group.index for group in groups) == [0, 2]
    assert all(rollout.success for group in groups for rollout in group.rollouts)
    assert [(item.job.group, item.reason) for item in lost] == [(1, "the wheel came off")]
    assert sorted(runtime.ended_rollouts) == [(g, r) for g in range(3) for r in range(4)]  # its rows may be composed


def test_lost_episodes_are_no_demonstrations_and_no_results() -> None:
    odd = tasks(3)[1][1].seed
    pool, lost = FakePool(2, some_length), list[Lost]()
    pool.loses = lambda slot, episode, went: episode.seed == odd
    (group,) = collect_expert(tasks(3), pool, FakePolicy(), fake_config(), 0, lost=lost)
    assert len(group.rollouts) == 2
    assert len(lost) == 1
    player = ScriptedPlayer(expert_choice(ACTIONS), None)
    records = run_episodes([(4, Episode("a", odd)), (5, Episode("b", 3))], pool, player, fake_config(), lost=lost)
    assert list(records) == [5]
    assert [item.job.group for item in lost] == [1, 4]
