"""What a video-QA run learns from and is measured by: groups of responses to rows of a set, its answers, held-out rows.

A question is an episode of one turn. Knows nothing about losses, steps of the optimizer or checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from agent.rewards import Answered, Rewards, Scored, answer_score, reward_metrics, reward_sums
from agent.video_qa import VideoQAPolicy
from configs.errors import UserError
from configs.schema import RunConfig
from data.check import check_sets, require_allowed
from data.decode_pool import DecodePool
from data.task_sampler import stable_seed
from data.types import Group, Prompt, Response, Rollout, Turn, TurnKey
from data.video_qa import VideoQARow
from data.video_qa_feed import BadVideo, ClipPool, Sample, VideoQAFeed, claim, open_feed, open_pool
from envs.registration import Episode
from rl.interfaces import Cursors, QuestionPolicy, Runtime
from rl.question_scores import QuestionEvaluation, evaluate_questions
from rl.rollout import Job, Lost, rollout_sampling
from runtime.rollplex import Rollplex


class QuestionSource:
    """Rank r takes every `world_size`-th row of the order.

    Args:
        rows: rows to train on; they may be none where nothing is trained.
        held_out: rows to evaluate on.
        pool: decodes clips.
        should_stop: asked while responses are decoded, which it cuts short.
    """

    max_turns = 1

    def __init__(
        self,
        config: RunConfig,
        rows: Sequence[VideoQARow],
        held_out: Sequence[VideoQARow],
        pool: ClipPool,
        policy: QuestionPolicy,
        rewards: Rewards,
        runtime: Runtime,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.rows, self.held_out = config, rows, held_out
        self.pool, self.policy, self.rewards, self.runtime = pool, policy, rewards, runtime
        self.lost: list[Lost] = []
        self._should_stop = should_stop
        self._digest = _digest(rows)
        self._cursors = Cursors({}, {})
        self._feeds: dict[str, VideoQAFeed] = {}
        self._scored: list[Scored] = []

    def teacher(self) -> nullcontext[None]:
        """The answers are in the set."""
        return nullcontext()

    def demonstrations(self, step: int) -> list[Group]:
        """The next rows with the tokens of their answers, as one group."""
        self.lost = []
        samples = self._next("imitation", self.config.imitation.episodes_per_step)
        rollouts = []
        for (_, sample), prompt in zip(samples, self._render(samples), strict=True):
            label = self.policy.label(sample.row)
            response = Response(label, (float("nan"),) * len(label), finish_reason="stop", policy_version=0)
            rollouts.append(Rollout(sample.row.id, (Turn(prompt, response),), 1.0, success=True, truncated=False))
        return [Group(samples[0][0], tuple(rollouts))] if rollouts else []

    def groups(self, step: int) -> Iterator[Group]:
        """`rl.group_size` responses to each of the next rows; a group with a lost reward is left out whole."""
        self.lost = []
        samples = self._next("rl", self.config.rl.groups_per_step)
        sampling, size = rollout_sampling(self.config, step), self.config.rl.group_size
        asked = {
            index: (sample, prompt) for (index, sample), prompt in zip(samples, self._render(samples), strict=True)
        }
        for index, (_, prompt) in asked.items():
            for rollout in range(size):
                key = TurnKey(index, rollout, 0)
                self.runtime.submit(key, prompt, sampling(key))
        answers: dict[int, dict[int, Response]] = {index: {} for index in asked}
        while self.runtime.has_unfinished() and not self._should_stop():
            for key, response in self.runtime.poll():
                self.runtime.end_rollout(key.group, key.rollout)
                answers[key.group][key.rollout] = response
                if len(answers[key.group]) == size:
                    responses = [answers[key.group][rollout] for rollout in range(size)]
                    if group := self._group(key.group, *asked[key.group], responses):
                        yield group

    def evaluate(self, folder: Path, videos: int | None = None) -> QuestionEvaluation | None:
        """Ask the held-out questions; `videos` is for environments, as rows name theirs."""
        return evaluate_questions(
            self.config, self.held_out, self.pool, self.policy, self.runtime, folder, should_stop=self._should_stop
        )

    def prompts(self, count: int) -> list[tuple[str, Prompt]]:
        """Prompts of some rows with their ids; no row of the run is used up."""
        found: list[tuple[str, Prompt]] = []
        for row in self.rows or self.held_out:
            if len(found) == count:
                break
            budget = self.policy.token_budget(row)
            try:
                clips = claim(self.pool, row, [self.pool.submit(video, budget) for video in row.videos])
            except BadVideo:
                continue
            found.append((row.id, self.policy.render([row], [clips])[0]))
        return found

    def metrics(self) -> dict[str, float]:
        """`data/*` of this rank, and in reinforcement learning `reward/*` of the responses since the last call."""
        sums = self.runtime.all_reduce(reward_sums(self._scored, tuple(self.config.reward.weights)))
        self._scored = []
        data = next(reversed(self._feeds.values())).metrics() if self._feeds else {}
        return data | (reward_metrics(sums) if sums["responses"] else {})

    def cursors(self) -> Cursors:
        """Where the two orders of rows are, of every rank; all ranks come here together."""
        return Cursors(*(self._positions(phase) for phase in ("imitation", "rl")))

    def load_cursors(self, cursors: Cursors) -> None:
        """Continue from saved cursors.

        Raises:
            UserError: the set has changed, so that a position in its order means nothing.
        """
        for saved in cursors:
            if saved and saved["rows"] != self._digest:
                raise UserError(
                    "the rows of data.train are not those that this run was trained on: a checkpoint's place in "
                    "their order means nothing. Put the files back, or start afresh with another run_dir=..."
                )
        self._cursors = cursors
        self._feeds.clear()

    def _positions(self, phase: str) -> dict[str, int]:
        position = self._feeds[phase].state()["next_position"] if phase in self._feeds else self._saved(phase)
        return {"rows": self._digest} | {
            key: int(value)
            for key, value in self.runtime.all_reduce({f"rank{self.runtime.rank}": float(position)}).items()
        }

    def _saved(self, phase: str) -> int:
        return int(getattr(self._cursors, phase).get(f"rank{self.runtime.rank}", 0))

    def _feed(self, phase: str) -> VideoQAFeed:
        """A phase's stream of rows, opened at its cursor when it is first needed."""
        if phase not in self._feeds:
            seed = stable_seed(self.config.seed, 1) if phase == "imitation" else self.config.seed
            config = replace(self.config, seed=seed)
            ranks = {"rank": self.runtime.rank, "world_size": self.runtime.world_size}
            feed = open_feed(config, self.rows, self.pool, token_budget=self.policy.token_budget, **ranks)
            feed.load_state({"seed": seed, "next_position": self._saved(phase)})
            self._feeds[phase] = feed
        return self._feeds[phase]

    def _next(self, phase: str, count: int) -> list[tuple[int, Sample]]:
        """This rank's share of the next rows, each with its position in the step's batch over all ranks."""
        mine = range(count)[self.runtime.rank :: self.runtime.world_size]
        return list(zip(mine, self._feed(phase).next(len(mine)), strict=True))

    def _render(self, samples: Sequence[tuple[int, Sample]]) -> list[Prompt]:
        return self.policy.render([sample.row for _, sample in samples], [sample.clips for _, sample in samples])

    def _group(self, index: int, sample: Sample, prompt: Prompt, responses: Sequence[Response]) -> Group | None:
        """The scored group; None where a reward was lost, which is noted."""
        texts = [self.policy.text(response.token_ids) for response in responses]
        answers = [Answered(text, len(item.token_ids)) for text, item in zip(texts, responses, strict=True)]
        scored = self.rewards.score(sample.row, answers)
        self._scored += scored
        episode = Episode(sample.row.id, sample.seed, "train")
        rollouts = []
        for place, (text, response, item) in enumerate(zip(texts, responses, scored, strict=True)):
            if item.reward is None:
                self.lost.append(Lost(Job(index, place, episode), item.lost_because))
                continue
            turn = Turn(prompt, response, invalid=item.is_unparsed, reward=item.reward)
            right = answer_score(text, sample.row, self.config.reward) == 1.0
            cut = response.finish_reason == "length"
            rollouts.append(Rollout(sample.row.id, (turn,), item.reward, right, cut, {"parts": item.parts}))
        return Group(index, tuple(rollouts)) if len(rollouts) == len(responses) else None


@contextmanager
def open_questions(config: RunConfig, model_dir: Path, should_stop: Callable[[], bool]) -> Iterator[QuestionSource]:
    """Rows, decode processes, rewards, policy and runtime of a run, closed together.

    The sets are checked whole before the model is loaded.

    Raises:
        UserError: the sets hold what the config does not allow, or one of those named holds no row to use.
    """
    policy = VideoQAPolicy(config, model_dir)
    report = check_sets(config, policy.count_tokens)
    require_allowed(report, config.data)
    held_out = report.usable("eval")
    if not held_out:
        raise UserError("no rows to evaluate on: name files in data.eval, and see `run.py data check`")
    pool: DecodePool
    with (
        open_pool(config, policy.spec) as pool,
        Rewards(config.reward, config.rollout.max_tokens) as rewards,
        Rollplex(config, model_dir, policy.vocabulary) as runtime,
    ):
        runtime.start()
        yield QuestionSource(config, report.usable("train"), held_out, pool, policy, rewards, runtime, should_stop)


def _digest(rows: Sequence[VideoQARow]) -> int:
    """A number that other rows, or the same in another order, would not have."""
    digest = hashlib.blake2b(digest_size=6)
    for row in rows:
        digest.update(f"{row.id}\n{row.question}\n{row.answer}\n".encode())
    return int.from_bytes(digest.digest())
