"""Which images run on which GPU and driver, and the reasons against the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.common.errors import RefusedError, UsageError
from builder.compat import gpu_support
from builder.compat.gpu_support import Device, ImageNeeds, Verdict
from builder.matrix import cells, facts
from builder.matrix.project import Project
from tests.paths import ROOT

KNOWN = facts.load_facts()
TORCH_128 = ImageNeeds(
    cuda="12.8", driver="525.60.13", architectures=("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    compiled="12.8",
)  # fmt: skip
TF_220 = ImageNeeds(
    cuda="12.8", driver="525.60.13", architectures=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"), compiled="12.5.1"
)
TF_29 = ImageNeeds(
    cuda="11.8", driver="450.80.02", architectures=("sm_60", "sm_70", "sm_75", "compute_80"), compiled="11.2"
)
CPU = ImageNeeds(cuda="cpu")
OLD = ImageNeeds(cuda="11.8", driver="450.80.02", architectures=("sm_35", "sm_50"), compiled="11.2")


def gpu(name: str) -> Device:
    return gpu_support.find_gpu(name, KNOWN)


# Name and compute capability -> what a person or a driver calls it.
NAMES = {
    ("GeForce RTX 5090", "12.0"): ["RTX 5090", "nvidia geforce rtx 5090", "rtx5090", "5090"],
    ("GeForce RTX 4090", "8.9"): ["NVIDIA GeForce RTX 4090 Laptop GPU"],
    ("GeForce RTX 3080 Ti", "8.6"): ["RTX 3080 Ti"],
    ("A100", "8.0"): ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb+me"],
    ("H100", "9.0"): ["NVIDIA H100 80GB HBM3", "H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
    ("GH200", "9.0"): ["NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"],
    ("Tesla V100", "7.0"): ["Tesla V100-SXM2-16GB", "V100"],
    ("Tesla K80", "3.7"): ["Tesla K80"],
    ("Tesla K40", "3.5"): ["K40"],
    ("GeForce RTX 4090 D", "8.9"): ["NVIDIA GeForce RTX 4090 D"],
    ("GeForce GTX 1080", "6.1"): ["GeForce GTX 1080 with Max-Q Design"],
    ("RTX 6000 Ada", "8.9"): ["NVIDIA RTX 6000 Ada Generation"],
    ("RTX PRO 6000 Blackwell", "12.0"): ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
    ("12.0", "12.0"): ["sm_120", "12.0"],
}


@pytest.mark.parametrize(("text", "device"), [(text, device) for device in NAMES for text in NAMES[device]])
def test_find_gpu(text: str, device: tuple[str, str]) -> None:
    name, capability = device
    assert gpu_support.find_gpu(text, KNOWN) == Device(name=name, capability=capability)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("RTX 6000", "; similar: .*RTX 6000 Ada"), ("RTX 5091", "; similar: .*GeForce RTX 5090"), ("GPU", "")],
)
def test_an_unknown_gpu_is_answered_with_similar_names(text: str, answer: str) -> None:
    with pytest.raises(UsageError, match=f"unknown GPU '{text}'{answer}"):
        gpu_support.find_gpu(text, KNOWN)


@pytest.mark.parametrize("text", ["MI300X", "AMD Instinct MI250", "Radeon RX 7900 XTX", "rx7900xtx"])
def test_a_gpu_of_amd_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match=r"GPUs of AMD are not supported"):
        gpu_support.find_gpu(text, KNOWN)


def test_every_name_is_found_by_itself() -> None:
    for capability, group in KNOWN.gpus.items():
        for name in group.names + group.arm:
            assert gpu(name) == gpu(f"NVIDIA {name}") == Device(name=name, capability=capability)


ARM = "{} exists only with an ARM CPU; the image is for x86_64"
PTX_NOTE = "PTX but no machine code for this GPU: the first start compiles it, which takes minutes"


def test_a_gpu_with_an_arm_cpu_runs_images_for_arm64() -> None:
    for name, image in (("GH200", TORCH_128), ("GB10", TORCH_128), ("GB10", CPU)):
        device = gpu_support.find_gpu(name, KNOWN)
        assert gpu_support.judge(device, "580.65.06", image, KNOWN).runs is False
        assert gpu_support.judge(device, "580.65.06", replace(image, arch="arm64"), KNOWN).runs


@pytest.mark.parametrize(
    ("name", "driver", "image", "runs", "reasons"),
    [
        ("RTX 5090", "570.124.06", TORCH_128, True, ()),
        (
            "RTX 5090", "550.54", TORCH_128, False,
            ("driver 550.54 is too old: GeForce RTX 5090 (12.0) needs 570.26 or newer",),
        ),
        (
            "A100", "470.57.02", TORCH_128, False,
            ("driver 470.57.02 is too old: CUDA 12.8 needs 525.60.13 or newer",),
        ),
        (
            "RTX 5090", "450", TORCH_128, False,
            # Of several minimum versions only the newest: it satisfies the others.
            ("driver 450 is too old: GeForce RTX 5090 (12.0) needs 570.26 or newer",),
        ),
        # Machine code of sm_86 on 8.9, of sm_120 on 12.1, of sm_100 on 10.3; not of sm_70 on 6.1.
        ("RTX 4090", "570", TORCH_128, True, ()),
        ("12.1", "580", TORCH_128, False, (ARM.format("compute capability 12.1"),)),
        ("GB10", "580", TORCH_128, False, (ARM.format("GB10"),)),
        ("B300", "580", TORCH_128, True, ()),
        (
            "GTX 1080", "570", TORCH_128, False,
            (
                "neither machine code nor PTX for compute capability 6.1 (GeForce GTX 1080): "
                "only sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
            ),
        ),
        # PTX
        ("RTX 5090", "570", TF_220, True, (PTX_NOTE,)),
        ("A100", "460.32.03", TF_29, True, (PTX_NOTE,)),
        (
            "A100", "450.80.02", TF_29, False,
            ("driver 450.80.02 is too old: its PTX (CUDA 11.2) needs 460.27.03 or newer",),
        ),
        (
            "RTX 5090", "570", TF_29, None,
            ("CUDA 11.8 is older than GeForce RTX 5090 (supported since CUDA 12.8): "
             "whether its libraries run there is unknown",),
        ),
        (
            "RTX 5090", "570", ImageNeeds(cuda="13.9", architectures=("compute_80",)), False,
            ("driver 570 is too old: CUDA 13.9 needs 580.65.06 or newer",),
        ),
        (
            "RTX 5090", "580", ImageNeeds(cuda="13.9", architectures=("compute_80",)), None,
            ("the driver that its PTX (CUDA 13.9) needs is unknown",),
        ),
        # Branches that dropped a GPU
        ("V100", "580.65.06", TORCH_128, True, ()),
        (
            "V100", "595.45.04", TORCH_128, False,
            ("driver 595.45.04 is too new: 580 is the last branch that supports Tesla V100",),
        ),
        ("K80", "535.54.03", OLD, False,
         ("driver 535.54.03 is too new: 470 is the last branch that supports Tesla K80",)),
        ("3.5", "535.54.03", OLD, False,
         ("driver 535.54.03 is too new: 470 is the last branch that supports compute capability 3.5",)),
        # A GPU or a CUDA that facts.yaml does not have
        ("9.9", "580", TORCH_128, None, ("the drivers that support compute capability 9.9 are unknown",)),
        ("H100", "580", ImageNeeds(cuda="99.8", architectures=("sm_90",)), None,
         ("the oldest driver for CUDA 99.8 is unknown",)),
        ("H100", "580", ImageNeeds(cuda="99.8", driver="570.26", architectures=("sm_90",)), True, ()),
        # No driver given
        ("RTX 5090", "", TORCH_128, True, ("needs driver 570.26 or newer",)),
        ("V100", "", TORCH_128, True, ("needs driver 525.60.13 or newer",)),
        # CPU, and unknown properties
        ("RTX 5090", "390.12", CPU, True, ("a CPU image needs no GPU",)),
        ("A100", "570", ImageNeeds(cuda="12.8"), None, ("the GPUs that its framework was compiled for are unknown",)),
        ("GB10", "", CPU, False, (ARM.format("GB10"),)),
    ],
)  # fmt: skip
def test_judge(name: str, driver: str, image: ImageNeeds, runs: bool | None, reasons: tuple[str, ...]) -> None:
    assert gpu_support.judge(gpu(name), driver, image, KNOWN) == Verdict(runs=runs, reasons=reasons)


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_90a", "9.0", True),
        ("sm_100a", "10.3", False),
        ("sm_100f", "10.3", True),
        ("sm_103", "10.0", False),
        ("compute_90", "12.0", True),
        ("compute_90a", "12.0", False),
        ("compute_120", "10.0", False),
        ("sm_80", "9.0", False),
    ],
)
def test_an_architecture(architecture: str, capability: str, runs: bool) -> None:
    image = ImageNeeds(cuda="12.9", architectures=(architecture,))
    assert gpu_support.judge(gpu(capability), "", image, KNOWN).runs is runs


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "GB200", "NVIDIA GB300", "GB10"])
def test_a_gpu_with_an_arm_cpu_by_the_name_that_the_driver_reports(name: str) -> None:
    known = gpu(name)
    reported = Device(name=f"NVIDIA {known.name}", capability=known.capability)  # by NVML
    for device in (known, reported):
        verdict = gpu_support.judge(device, "580", TORCH_128, KNOWN)
        assert verdict == Verdict(runs=False, reasons=(ARM.format(device.name),))


@pytest.mark.parametrize("capability", ["5.3", "8.7", "11.0"])
def test_tegra(capability: str) -> None:
    everything = ImageNeeds(cuda="12.8", driver="525.60.13", architectures=tuple(
        f"sm_{number}" for number in (50, 60, 70, 80, 100, 110)
    ))  # fmt: skip
    assert gpu_support.judge(gpu(capability), "580", everything, KNOWN) == Verdict(
        runs=False, reasons=(ARM.format(f"compute capability {capability}"),)
    )


@pytest.mark.parametrize("name", ["H100", "B200", "B300", "9.0", "10.0", "10.3"])
def test_other_gpus_of_the_same_compute_capability_have_any_cpu(name: str) -> None:
    assert gpu_support.judge(gpu(name), "580", TORCH_128, KNOWN).runs is True


def test_a_caveat_is_shown_where_the_image_runs() -> None:
    jax, pytorch = (replace(TORCH_128, framework=framework) for framework in ("jax", "pt"))
    verdict = gpu_support.judge(gpu("B200"), "580", jax, KNOWN)
    assert verdict.runs is True
    assert any("silently corrupt data" in reason for reason in verdict.reasons)
    assert gpu_support.judge(gpu("H100"), "580", jax, KNOWN) == Verdict(runs=True)
    assert gpu_support.judge(gpu("B200"), "580", pytorch, KNOWN) == Verdict(runs=True)


def test_a_gpu_of_unknown_compute_capability() -> None:
    verdict = gpu_support.judge(Device(name="Odd"), "570", TORCH_128, KNOWN)
    assert verdict == Verdict(runs=None, reasons=("the compute capability of Odd is unknown",))


@pytest.mark.parametrize("driver", ["new", "570.", "57", "570.1.2.3", "\u0665\u0667\u0660"])
def test_an_invalid_driver_version(driver: str) -> None:
    with pytest.raises(UsageError):
        gpu_support.judge(gpu("A100"), driver, TORCH_128, KNOWN)


def test_needs_of_a_cell() -> None:
    matrix = Project(ROOT).matrix
    cuda, cpu, arm64 = (
        cells.cell_of_id(matrix, name, "x")
        for name in ("tf-2.21-cu128-py311", "tf-2.21-cpu-py311", "pt-2.15-cu132-py313-jupyter-arm64")
    )
    build = KNOWN.builds["tensorflow"]["2.21.0"]
    assert gpu_support.needs_of_cell(matrix, cuda, KNOWN) == ImageNeeds(
        cuda="12.8", driver="525.60.13", architectures=tuple(build.architectures), compiled=build.cuda,
        framework="tensorflow",
    )  # fmt: skip
    unknown = KNOWN.model_copy(update={"builds": {}})
    assert gpu_support.needs_of_cell(matrix, cuda, unknown).architectures == ()
    assert gpu_support.needs_of_cell(matrix, cpu, KNOWN) == replace(CPU, framework="tensorflow")
    assert gpu_support.needs_of_cell(matrix, arm64, KNOWN).arch == "arm64"
