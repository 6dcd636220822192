"""GPU checks of vLLM: a tiny model of random weights, which needs no hub, generates tokens."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from . import common, nvml
from .common import Checks, Figure, Setup, equal, note

CHECKS = Checks()
TOKENS = 16
# A head has 64 numbers, which all kernels of attention support.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def begin(system: nvml.System) -> Setup:
    """vLLM with a GPU; raises Failed if there is none."""
    torch = common.load("torch")
    if not torch.cuda.is_available():
        raise common.no_gpu(f"PyTorch {torch.__version__}", torch.version.cuda or "", system)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: an error of it is ours
    vllm = common.load("vllm")
    return Setup(vllm, torch.device("cuda", 0), vllm.__version__, torch.version.cuda or "")


@CHECKS.add("generate")
def generate(vllm: Any, device: Any) -> list[Figure]:
    """A model generates as many tokens as asked, and the same ones again."""
    del device
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        engine = vllm.LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=128, gpu_memory_utilization=0.2, seed=0
        )
        options = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": list(range(3, 35))}
        first, again = (list(engine.generate([prompt], options)[0].outputs[0].token_ids) for _ in range(2))
    return [
        equal("tokens", len(first), TOKENS),
        equal("tokens outside the vocabulary", sum(not 0 <= token < MODEL["vocab_size"] for token in first), 0),
        equal("answers that differ", int(first != again), 0),
        note("tokens of the prompt", 32),
    ]
