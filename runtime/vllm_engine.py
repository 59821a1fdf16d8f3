"""The rollout engine: vLLM in this process, sampling from the trainer's own weights.

Everything that names vLLM is here: start-up, the loader that points its parameters at the trainer's memory, prompts
that were rendered elsewhere (token in, pixel in), and the caches that a new policy version invalidates. Written for
vLLM 0.32 on a CPU and 0.24 on a GPU; other versions are refused.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from configs.errors import UserError
from configs.schema import RuntimeConfig
from data.types import Prompt, Response, Sampling, TurnKey, Vocabulary
from runtime.lane import DECODE_PRIORITY
from runtime.overlap import Load
from runtime.prefill import PrefillHooks, Prefills
from runtime.weights import Binding

logger = logging.getLogger(__name__)

TESTED_VLLM = ("0.32.0", "0.24.0")


CPU_OPTIONS: dict[str, Any] = {"enforce_eager": True}
GPU_OPTIONS: dict[str, Any] = {
    # Starts in 40 s instead of minutes: no inductor, graphs for decode alone.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    # The KV cache has a size of its own; this only keeps vLLM from refusing a device that the trainer shares.
    "gpu_memory_utilization": 0.2,
    "enable_sleep_mode": True,
    "mm_encoder_tp_mode": "data",
}


class PromptTooLong(UserError, ValueError):
    """A prompt and its response do not fit the context that the engine was started with."""


class StaleCache(RuntimeError):
    """The engine could not drop what older weights computed."""


def _options(config: RuntimeConfig, version: str) -> dict[str, Any]:
    """How every engine of this runtime is set."""
    options = GPU_OPTIONS if torch.cuda.is_available() else CPU_OPTIONS
    if version.startswith("0.32"):
        options = options | {"mm_device_do_normalize": False}  # the prompt's pixels are normalised already
    return {
        "load_format": "rollplex",
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": max(config.max_model_len, config.microbatch_tokens),
        "max_num_seqs": config.max_num_seqs,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
        "disable_log_stats": True,
        "generation_config": "vllm",
        **options,
    }


class RolloutEngine:
    """Samples responses from the trainer's weights.

    Args:
        trainer: the trainer's parameters by Hugging Face name; the engine's become views of them.
        seed: seeds what is sampled without a seed of its own.
        max_videos: most videos of a prompt.
        prefills: says which prompts are wanted as they are prefilled, and takes them.
        share: False copies them instead, at every `publish` (ZeRO-3).
    """

    def __init__(
        self,
        config: RuntimeConfig,
        model_dir: Path,
        dtype: str,
        vocabulary: Vocabulary,
        trainer: Mapping[str, nn.Parameter],
        *,
        seed: int,
        max_videos: int,
        prefills: Prefills,
        share: bool = True,
    ) -> None:
        import vllm

        if vllm.__version__.split("+")[0] not in TESTED_VLLM:
            raise UserError(
                f"vllm {vllm.__version__} is installed, Rollplex needs one of {', '.join(TESTED_VLLM)}: make install"
            )
        self.vocabulary = vocabulary
        self.policy_version = 0
        self.asleep = False
        self._host_features: tuple[str, torch.Tensor] = ("", torch.empty(0))
        self.prefills = prefills
        self._hooks: PrefillHooks | None = None
        self.binding: Binding
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            _keep_cpu_weights()
        _keep_process_group()
        self._register_loader(trainer, share)
        with _prior_graphs():
            self.llm = vllm.LLM(
                str(model_dir),
                dtype=dtype,
                seed=seed,
                logits_processors=[_forbid(vocabulary.forbidden)],
                limit_mm_per_prompt={"video": max_videos, "image": 0},
                **_options(config, vllm.__version__),
            )
        torch.manual_seed(seed)  # vLLM samples from the global generator
        self._fields = self._mm_fields()
        self._while_decoding: Callable[[], None] | None = None
        self._error: Exception | None = None
        """What the callback raised during the step under way."""
        self._use_the_wait()

    def _register_loader(self, trainer: Mapping[str, nn.Parameter], share: bool) -> None:
        """Make `load_format="rollplex"` build the module without weights and bind it to the trainer's."""
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        engine = self

        class SharedWeightsLoader(BaseModelLoader):
            def download_model(self, model_config: Any) -> None:
                pass

            def load_weights(self, model: nn.Module, model_config: Any) -> None:
                pass

            def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
                device = next(iter(trainer.values())).device
                with set_default_torch_dtype(model_config.dtype):
                    with torch.device("cpu"):  # nothing touches the pages of weights that are not kept
                        model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                    engine.binding = Binding(model, trainer, share=share)
                    _move_buffers(model, device)
                    process_weights_after_loading(model, model_config, device)
                engine.binding.check()
                return model.eval()

        logging.getLogger("vllm.model_executor.model_loader").setLevel(logging.ERROR)  # "already registered"
        register_model_loader("rollplex")(SharedWeightsLoader)

    def _mm_fields(self) -> Any:
        """vLLM's own description of the processor outputs that its model takes."""
        processor = self.llm.llm_engine.input_processor.renderer.mm_processor
        return lambda inputs: processor._get_mm_fields_config(inputs, {})

    @property
    def core(self) -> Any:
        """vLLM's engine core, which runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        """vLLM's model runner, which holds its model and the batch under way."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def _use_the_wait(self) -> None:
        """Have `step`'s callback run where vLLM would only wait.

        In vLLM 0.32 and 0.24 that is its model runner's `_to_list`, which copies the sampled tokens to the host after
        everything else of the step has been launched; without this, window work is handed out while the device idles.
        """
        to_list: Callable[[torch.Tensor], list[list[int]]] = self.runner._to_list

        def call_then_wait(sampled_token_ids: torch.Tensor) -> list[list[int]]:
            if self._while_decoding is not None:
                try:
                    with torch.inference_mode(False):  # gradients are on again
                        self._while_decoding()
                except Exception as error:  # raised through vLLM, it would be reported as a fault of vLLM's input
                    self._error = error
            return to_list(sampled_token_ids)

        self.runner._to_list = call_then_wait

    def submit(
        self, key: TurnKey, prompt: Prompt, sampling: Sampling, features: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Queue one response.

        Args:
            features: vision features of the prompt's media, in order; None lets the engine's own tower compute them.

        Raises:
            PromptTooLong: prompt and response do not fit `runtime.max_model_len`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        limit = self.llm.llm_engine.model_config.max_model_len
        if len(prompt.token_ids) + sampling.max_tokens > limit:
            raise PromptTooLong(
                f"a prompt of {len(prompt.token_ids)} tokens and {sampling.max_tokens} of response exceed "
                f"runtime.max_model_len={limit}: raise it, or lower agent.max_pixels or agent.context_clips"
            )
        wanted = self.prefills.wants(key)
        if wanted and self._hooks is None:
            self._hooks = PrefillHooks(self.runner, self.prefills, turn_key)
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            logprobs=0,
            stop_token_ids=[self.vocabulary.end_of_turn],
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=wanted,  # so that all of the prompt is computed
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.llm_engine.add_request(_request_id(key), self._engine_input(prompt, features), parameters)

    def _engine_input(self, prompt: Prompt, features: Sequence[torch.Tensor] | None) -> Any:
        """A rendered prompt as vLLM takes it after its own processor, which therefore never runs."""
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not prompt.media:
            return tokens_input(prompt_token_ids=list(prompt.token_ids))
        if features is None:
            pixels = {"pixel_values_videos": torch.cat([item.pixel_values for item in prompt.media])}
        else:
            pixels = {"video_embeds": self._on_host(prompt, features)}
        inputs = BatchFeature(
            {
                **pixels,
                "video_grid_thw": torch.tensor([item.grid_thw for item in prompt.media]),
                "second_per_grid_ts": torch.tensor([item.seconds_per_grid for item in prompt.media]),
            }
        )
        return mm_input(
            prompt_token_ids=list(prompt.token_ids),
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(inputs, self._fields(inputs)),
            mm_hashes={"video": [item.content_hash for item in prompt.media]},
            mm_placeholders={
                "video": [PlaceholderRange(offset=item.offset, length=item.num_tokens) for item in prompt.media]
            },
        )

    def _on_host(self, prompt: Prompt, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features where vLLM wants them: it pins them and copies them back when they are needed.

        Those of the last prompt are kept, since the responses of a group are queued one after another.
        """
        key, kept = self._host_features
        if key != prompt.key:
            kept = torch.cat(list(features)).cpu()
            self._host_features = (prompt.key, kept)
        return kept

    def has_unfinished(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def load(self) -> Load:
        """Responses under way, and those whose prompt waits for its prefill."""
        return Load(*self.core.scheduler.get_request_counts())

    def step(self, while_decoding: Callable[[], None] | None = None) -> list[tuple[TurnKey, Response]]:
        """One decode step; the responses that ended in it, by key.

        Args:
            while_decoding: called once all of the step has been launched, before the host waits for its tokens; on the
                decode stream, outside inference mode. What it raises is raised when the step is over.
        """
        self._while_decoding = while_decoding
        try:
            outputs = self.llm.llm_engine.step()
        finally:
            error, self._error = self._error, None
            if error is not None:
                raise error
        ended = [output for output in outputs if output.finished]
        return sorted(
            ((turn_key(output.request_id), self._response(output)) for output in ended), key=lambda pair: pair[0]
        )

    def _response(self, output: Any) -> Response:
        (sample,) = output.outputs
        token_ids = tuple(sample.token_ids)
        return Response(
            token_ids=token_ids,
            behaviour_logprobs=tuple(
                entry[token].logprob for entry, token in zip(sample.logprobs, token_ids, strict=True)
            ),
            finish_reason="stop" if token_ids[-1] == self.vocabulary.end_of_turn else "length",
            policy_version=self.policy_version,
        )

    def check_idle(self) -> None:
        """No response is being decoded, so that weights may change.

        Raises:
            StaleCache: one is; its blocks hold keys and values of the present weights.
        """
        if self.has_unfinished():
            raise StaleCache(
                f"the weights were to change while responses of version {self.policy_version} still decode"
            )

    def sleep(self) -> bool:
        """Give the KV cache's memory back until `wake`; the CUDA graphs stay valid. False where there is no GPU."""
        self.check_idle()
        if torch.cuda.is_available():
            self.llm.sleep(level=1)
            self.asleep = True
        return self.asleep

    def wake(self) -> None:
        """Take the KV cache's memory again, empty."""
        self.llm.wake_up()
        self.asleep = False

    def publish(self, policy_version: int) -> None:
        """Make the trainer's present weights the ones that responses are sampled from.

        Raises:
            StaleCache: a request is still running, or vLLM keeps blocks of older weights.
            StorageMoved: the weights are no longer shared.
        """
        self.check_idle()
        if self.binding.share:
            self.binding.check()
        else:
            self.binding.copy()
        if not self.llm.llm_engine.reset_prefix_cache():
            raise StaleCache(f"vLLM did not drop the prefix cache of version {self.policy_version}")
        self.llm.llm_engine.reset_encoder_cache()
        self._host_features = ("", torch.empty(0))
        self.policy_version = policy_version

    def close(self) -> None:
        """End the engine and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        gc.collect()


@contextmanager
def _prior_graphs() -> Iterator[None]:
    """Inside, vLLM (0.24, 0.32) captures CUDA graphs on a stream of decode's priority; its own streams have the lowest.

    Kernels of a graph keep the priority of the stream that they were captured on, whatever stream they are replayed on:
    without this, work that lasts into a decode step goes before it.
    """
    import vllm.distributed.parallel_state as state

    stock = state.GraphCaptureContext

    def prior(stream: Any) -> Any:
        return stock(torch.cuda.Stream(stream.device, priority=DECODE_PRIORITY))

    state.GraphCaptureContext = prior
    try:
        yield
    finally:
        state.GraphCaptureContext = stock


def _keep_process_group() -> None:
    """Leave the process group alone when an engine ends: it is the trainer's.

    vLLM 0.32's in-process engine core destroys it, and DeepSpeed's next collective fails.
    """
    import vllm.v1.engine.core as core
    from vllm.distributed.parallel_state import destroy_model_parallel

    core.cleanup_dist_env_and_memory = destroy_model_parallel


def _request_id(key: TurnKey) -> str:
    return ".".join(map(str, key))


def turn_key(request_id: str) -> TurnKey:
    # vLLM appends a suffix of its own after a hyphen to keep ids unique.
    return TurnKey(*map(int, request_id.partition("-")[0].split(".")))


def _keep_cpu_weights() -> None:
    """Leave linear weights as they are: vLLM's CPU backend packs them at load and empties the originals."""
    import vllm.model_executor.layers.utils as layers

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    layers.dispatch_cpu_unquantized_gemm = plain_linear


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what is no parameter (rotary tables, cached tensors) to the device that the parameters are on."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                setattr(module, name, value.to(device))


def _forbid(token_ids: tuple[int, ...]) -> type:
    """A logits processor class that gives these tokens probability 0 in every request."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class ForbiddenTokens(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.columns = torch.tensor(token_ids, dtype=torch.long, device=device)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(1, self.columns, float("-inf"))

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            pass

    return ForbiddenTokens
