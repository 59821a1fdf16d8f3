"""Every knob of a run, with its default, unit and range.

Plain values only. `configs.load` reads them from YAML and the command line; nothing changes a config afterwards.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
SetFormat = Literal["own", "demo", "video_r1", "spacer", "nextqa", "llava_video", "vsi_bench", "perception_test"]
"""How a file of questions is laid out (`data.readers`); `demo` is `own`, made where it is missing (`data.demo_set`)."""
REWARD_PARTS = ("answer", "choice", "exact", "numeric", "mra", "span", "text", "ocr", "format", "length")
"""Built-in parts of a reward (`agent.rewards`)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The vision-language model that is trained."""

    path: str = "tiny:qwen2_5_vl"
    """Hugging Face folder or hub id; `tiny:qwen2_5_vl` builds a small random one without a download."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the shared weights. A CPU runs float32; a GPU bfloat16."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvConfig:
    """The simulator and the pool of processes that runs it."""

    id: str = "rooms"
    """Name in `envs.registration`, `gym:` and a gymnasium id, or `module.path:ClassName`."""
    num_envs: Count = 16
    """Environments that exist at once (count)."""
    workers: Count = 1
    """Processes that share them (count); a simulator that allows one a process has `num_envs` of them."""
    python: str = ""
    """Interpreter of the simulator's processes, where it cannot live in ours; empty: ours."""
    address: str = ""
    """`host:port` of an `envs/server.py --listen`; empty: processes of our own."""
    max_turns: Count = 20
    """Turns after which an episode is truncated (count)."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A process that takes longer to build its environments is a fault (s)."""
    reset_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A reset that takes longer is a fault (s)."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A decision that takes longer is a fault (s)."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Faults (crash, hang, exception) of one episode after which its process is started again and the episode replayed
    up to where it was (count); one more, and the episode is lost: not trained on, not counted as a failure."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AgentConfig:
    """From observations to prompts and from responses to actions."""

    system_prompt: str = ""
    """Empty: no system turn."""
    instruction_template: str = "{instruction}"
    """Text of a user turn; `{instruction}` and `{actions}` are filled in."""
    max_actions: Count = 3
    """Primitive actions one response may hold (count)."""
    invalid_action: Literal["noop", "terminate"] = "noop"
    """What a response that does not parse does: one step without an action, or the end of the episode as a failure."""
    context: Literal["window", "history"] = "window"
    """`window`: each turn sees the last `context_clips` clips. `history`: one conversation that grows all episode."""
    context_clips: Count = 1
    """Clips of the last turns that a prompt shows, the newest last; of no use with `history` (count)."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames a second that a clip's timestamps claim (1/s)."""
    min_pixels: Count = 28 * 28
    max_pixels: Count = 28 * 28 * 64
    """Bounds on a frame's area after resizing (pixels)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """Sampling during rollouts."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The trainer divides its logits by it too, so that both sides mean the same distribution."""
    max_tokens: Count = 8
    """Longest response (tokens)."""
    deterministic: bool = False
    """Admit turns at barriers in index order and seed each request, so that a run repeats to the bit."""


NEEDS_BATCH = frozenset({"reinforce_pp"})
"""Values of `rl.advantage` that compare rollouts of the whole step."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RLConfig:
    """Groups of rollouts and the policy-gradient loss."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts sampled per task (count)."""
    groups_per_step: Count = 8
    """Tasks per optimizer step, over all ranks (count)."""
    advantage: Literal["grpo", "dr_grpo", "reinforce_pp"] = "grpo"
    """`grpo` divides by the group's standard deviation and averages tokens per rollout; `dr_grpo` does neither;
    `reinforce_pp` divides by the whole batch's standard deviation, so that no group is trained on before all exist."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(actor || reference); 0 loads no reference."""
    epochs: Count = 1
    """Optimizer steps made from one batch of rollouts (count)."""
    mask_truncated: bool = False
    """Leave responses cut by `max_tokens` out of the loss."""
    skip_equal_groups: bool = False
    """Spend nothing on a group of equal rewards: it has no advantage, and only the KL term would act on it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """The optimizer (AdamW under DeepSpeed)."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    weight_decay: NonNegative = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm is clipped to it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0 (count)."""
    decay: Literal["none", "linear"] = "none"
    """`linear`: the learning rate falls towards 0 at the last of the run's `steps`."""
    vision_tower: Literal["frozen", "trained"] = "frozen"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImitationConfig:
    """Warm start: cross-entropy on the expert's actions or on the answers of a set, through the same trainer."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps before reinforcement learning begins (count); 0 skips it."""
    episodes_per_step: Count = 16
    """Expert episodes, or rows of the set, per optimizer step, over all ranks (count)."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    noise: Fraction = 0.0
    """Share of turns on which a random action is carried out instead of the expert's, which stays the label."""
    mistakes: Fraction = 0.0
    """Share of turns on which the teacher errs: a random action is carried out, and imitated."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RuntimeConfig:
    """Rollplex: what runs when, and what memory it may have."""

    schedule: Literal["unshared", "serial", "overlapped", "streamed"] = "overlapped"
    """What may run while responses are still decoded; the update is the same under all of them."""
    fallback: bool = True
    """Fall back to serial order where the measured overlap loses."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    kv_cache_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """vLLM's KV cache (bytes)."""
    max_num_seqs: Count = 64
    """Responses decoded at once (count)."""
    max_model_len: Count = 1024
    """Longest prompt and response together (tokens)."""
    microbatch_tokens: Count = 2048
    """Most tokens in one packed row; a single longer segment gets a row of its own (tokens)."""
    backlog: Count = 4
    """Most quanta of window work (one layer each) handed out from one decode step to the next (count)."""
    boundary_budget_bytes: Bytes = 4 << 30
    """Memory for kept encodings; past it they are recomputed (bytes)."""
    offload_optimizer: bool = False
    """On a GPU, keep optimizer states in HBM only while they are used, and the reference out of it meanwhile."""
    reuse_prefill: bool = False
    """Take the actor's part of a prompt from vLLM's own prefill instead of computing it a second time; backward
    recomputes its layers. A step is the same up to vLLM's rounding, which depends on what decodes beside it."""
    window_sms: Annotated[int, Field(ge=0)] = 0
    """Multiprocessors of a GPU set apart for window work, beside decode; 0 lets it take turns with decode (count)."""
    vision_cache_bytes: Bytes = 256 << 20
    """Memory for vision features, each clip's computed once while it holds them; past it, again (bytes)."""
    doctor: bool = True
    """Compare vLLM with the trainer on a few prompts before the first step, and stop where they differ."""
    trace: bool = False
    """Write the last step's timeline to `trace.json` in the run folder; Perfetto opens it."""
    hbm_bytes: Bytes = 0
    """Memory the plan must fit in; 0 takes the device's (bytes)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Evaluation on a fixed manifest of held-out episodes."""

    episodes: Count = 200
    manifest_seed: Annotated[int, Field(ge=0)] = 0
    """Seeds the list of held-out episodes, independent of the run's seed."""
    temperature: NonNegative = 0.0
    """0 is greedy, and gives the same result twice."""
    videos: Annotated[int, Field(ge=0)] = 8
    """Episodes, from the first, whose mp4 is written (count)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Sets of questions about videos, and how their clips are decoded."""

    train: dict[str, SetFormat] = Field(default_factory=dict)
    """Files to train on: path -> format. With `eval` empty too the run learns in `env`, and `data` is of no use."""
    eval: dict[str, SetFormat] = Field(default_factory=dict)
    """Files to evaluate on, held against those of `train` for leakage: path -> format; `eval.episodes` rows of them."""
    media_root: str = ""
    """Folder that relative paths of videos start from; empty: the folder of each file."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row that breaks a rule does; `run.py data check` lists all of them."""
    on_missing: Literal["stop", "skip"] = "stop"
    """What a row does whose video is not there."""
    on_leakage: Literal["stop", "warn"] = "stop"
    """What a video does that is in both sets."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames taken from a second of video (1/s)."""
    num_frames: Annotated[int, Field(ge=0)] = 0
    """Frames taken from a video whatever its length (count); 0 goes by `fps`."""
    max_frames: Count = 64
    """Most frames taken from a video (count)."""
    max_video_tokens: Annotated[int, Field(ge=0)] = 0
    """Most placeholder tokens of a video (tokens); 0: what `runtime.max_model_len` leaves."""
    over_budget: Literal["pixels", "frames"] = "pixels"
    """What is reduced first where a video has more; the other follows where that is not enough."""
    workers: Count = 2
    """Processes that decode (count)."""
    prefetch: Count = 16
    """Rows decoded ahead (count)."""
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A video that takes longer is tried once more, then it is bad (s)."""
    cache_dir: str = ""
    """Folder of decoded frames, which runs may share; empty: `frames` in `run_dir`."""
    cache_bytes: Bytes = 10 << 30
    """Size of that folder (bytes); 0 decodes every time."""
    max_bad_fraction: Fraction = 0.01
    """The run stops when more than this share of the rows it tried has a video that cannot be shown; until a set has
    been tried whole, chance is allowed for."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """What a response to a question is worth: a weighted sum of named parts."""

    weights: dict[str, float] = Field(default_factory=lambda: {"answer": 1.0})
    """Part -> weight. Parts: answer (by the row's kind), one kind by name, format, length, and those of `functions`."""
    functions: dict[str, str] = Field(default_factory=dict)
    """Your own parts: name -> `module:function`, importable from where the run was started, called with `responses` and
    `row`, returns a number for each."""
    function_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A call of such a function that takes longer is an error (s)."""
    on_error: Literal["stop", "lost"] = "stop"
    """A part that raises, hangs, or returns None, NaN or the wrong number of rewards stops the run, or the responses
    count as lost: they have no reward and are not trained on. Text or anything else that is no number always stops."""
    numeric_tolerance: NonNegative = 0.0
    """Relative error that still counts as equal; 3 equals 3.0 in any case."""
    format_pattern: str = r"(?s)\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    """Regular expression that a whole response must match for the part `format`."""
    length_free_tokens: Annotated[int, Field(ge=0)] = 0
    """Responses up to here have 0 in the part `length`, longer ones evenly less, to -1 at the limit (tokens)."""
    length_limit_tokens: Annotated[int, Field(ge=0)] = 0
    """Where the part `length` is -1 (tokens); 0: `rollout.max_tokens`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run: everything that `run.py` needs to know."""

    run_dir: str = "runs/default"
    """Folder of checkpoints, metrics, results and the resolved config."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps of reinforcement learning (count)."""
    resume: Literal["never", "auto"] = "never"
    """`auto` continues from the newest complete checkpoint in `run_dir`; `never` refuses a folder that has one."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations (count); 0 evaluates before and after only."""
    save_every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints (count); 0 saves at the end only."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept (count)."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    rl: RLConfig = Field(default_factory=RLConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    imitation: ImitationConfig = Field(default_factory=ImitationConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
