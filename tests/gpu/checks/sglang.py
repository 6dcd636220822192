"""GPU checks of SGLang: a tiny model of random weights, which needs no hub, generates tokens."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from . import common, nvml
from .common import Checks, Figure, Setup, equal, note
from .vllm import MODEL, TOKENS

CHECKS = Checks()


def begin(system: nvml.System) -> Setup:
    """SGLang with a GPU; raises Failed if there is none."""
    torch = common.load("torch")
    if not torch.cuda.is_available():
        raise common.no_gpu(f"PyTorch {torch.__version__}", torch.version.cuda or "", system)
    sglang = common.load("sglang")
    return Setup(sglang, torch.device("cuda", 0), sglang.__version__, torch.version.cuda or "")


@CHECKS.add("generate")
def generate(sglang: Any, device: Any) -> list[Figure]:
    """A model generates as many tokens as asked, and the same ones again."""
    del device
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        engine = sglang.Engine(
            model_path=folder, load_format="dummy", skip_tokenizer_init=True, mem_fraction_static=0.2, random_seed=0
        )
        options = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        answers = [engine.generate(input_ids=list(range(3, 35)), sampling_params=options) for _ in range(2)]
        engine.shutdown()
    first, again = (list(answer["output_ids"]) for answer in answers)
    return [
        equal("tokens", len(first), TOKENS),
        equal("tokens outside the vocabulary", sum(not 0 <= token < MODEL["vocab_size"] for token in first), 0),
        equal("answers that differ", int(first != again), 0),
        note("tokens of the prompt", 32),
    ]
