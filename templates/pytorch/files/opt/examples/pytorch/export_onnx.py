#!/usr/bin/env python3
"""Exports the model of train_ddp.py to a .pt2 program (torch.export) and to ONNX, and compares both with the model.

    python export_onnx.py --checkpoint checkpoints/train_ddp.pt --output exported

Both accept batches of any size. The exit code is 1 if a result differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.export import Dim
from train_ddp import FEATURES, build_model

# For float32, computed in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of train_ddp.py; without it, random weights")
    parser.add_argument("--output", type=Path, default=Path("exported"), help="output folder")
    options = parser.parse_args()
    try:
        import onnxruntime  # noqa: PLC0415  (for the message below)
        import onnxscript  # noqa: F401, PLC0415  (torch.onnx.export needs it)
    except ImportError as error:
        print(f"{error.name} is missing: python -m pip install onnx onnxscript onnxruntime", file=sys.stderr)
        return 1

    torch.manual_seed(0)
    model = build_model().eval()  # without eval(), the export would contain dropout
    if options.checkpoint:
        model.load_state_dict(torch.load(options.checkpoint, map_location="cpu", weights_only=True)["model"])
    options.output.mkdir(parents=True, exist_ok=True)
    program_file, onnx_file = options.output / "model.pt2", options.output / "model.onnx"

    # More than one sample: torch.export treats batches of 0 and 1 as fixed.
    example = (torch.randn(4, FEATURES),)
    program = torch.export.export(model, example, dynamic_shapes=({0: Dim("batch")},))
    torch.export.save(program, program_file)
    onnx = torch.onnx.export(program, dynamo=True, input_names=["features"], output_names=["scores"])
    assert onnx is not None
    onnx.save(onnx_file)

    loaded = torch.export.load(program_file).module()
    session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    wrong = 0
    for batch in (1, 7):
        inputs = torch.randn(batch, FEATURES)
        with torch.inference_mode():
            expected = model(inputs)
            results = {
                program_file: loaded(inputs),
                onnx_file: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0]),
            }
        for path, result in results.items():
            agrees = result.shape == expected.shape and torch.allclose(result, expected, **TOLERANCE)
            difference = float((result - expected).abs().max()) if result.shape == expected.shape else float("nan")
            wrong += not agrees
            print(
                f"{path}, batch of {batch}: {'agrees' if agrees else 'DIFFERS'} (largest difference {difference:.1e})"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
