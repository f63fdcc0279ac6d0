"""Rates of a machine: links and matrix products, by the name of its GPU.

    profile = hardware_of("NVIDIA H200")
    profile.nvlink      LinkRate(bytes_per_second=3.2e11, latency=1.2e-05)
    profile.source      "measured (docs/measurements.md)"

Where a rate comes from decides how far to trust it, so each profile says so, and runs record it:

    measured     on this hardware, as docs/measurements.md shows
    datasheet    the vendor's peak, times the share of its own peak that an H200 was measured to reach: 320 of 450 GB/s
                 on NVLink, 500 of 989 TFLOP/s in the experts' matrix products
    assumed      nothing is known about this device; the numbers are those of a similar one

Links between nodes are no property of a GPU. They are assumed in every profile: one port of 400 Gb/s for each GPU
(200 for those of the A100's generation). `carpool doctor --measure` measures all of it, and writes a file that
`find_hardware` reads:

    find_hardware("H100")               a profile by its name
    find_hardware("hardware.json")      what was measured

A kind of kernel takes `latency + operations / rate + bytes / bandwidth` (`Work`). Kernels that overlapped the three
perfectly would take the largest, and none does: the sum fits grouped products of 200 to 2,000 tokens an expert within
5 % (docs/measurements.md).

    kind                 operations                               bytes
    dense                2 m n k of one product                   both factors and the result
    experts              6 H F for each pair                      pairs (2 H + 3 F), and the weights once
    experts backward     12 H F                                   pairs (4 H + 8 F), and the weights three times
    attention D          4 D for each head and pair of tokens     none; D is the size of queries and keys
    attention D backward 10 D                                     none
    elementwise          none                                     read and written
    optimizer            none                                     read and written in one update
    launch               none: its latency is what the host needs to launch a kernel
    host ride            none: the same of an MoE layer's forward and backward
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np

from carpool.plugins.nearest import did_you_mean

Source = Literal["measured", "fitted", "datasheet", "assumed"]
# How far a time may be off if its rate was not measured on this device, as (shorter, longer). Fitted rates are of runs
# that are too short for a card to slow down at its power limit: to 0.83 of an H200's clock in steps of 340 ms.
SPREAD: Mapping[str, tuple[float, float]] = {
    "measured": (0.97, 1.05), "fitted": (0.93, 1.15), "datasheet": (0.80, 1.30), "assumed": (0.67, 1.60),
}  # fmt: skip
HEAD_SIZES = (64, 128, 192)


@dataclass(frozen=True)
class Work:
    """One kind of kernel.

    Attributes:
        flops_per_second, bytes_per_second: None: that term is 0.
        latency: seconds.
        residual: root of the mean square of (fitted - measured) / measured; 0 if it is of one point.
        source: where it is from.
    """

    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    latency: float = 0.0
    residual: float = 0.0
    source: Source = "assumed"

    def seconds(self, flops: float, moved: float = 0.0) -> float:
        """Of one kernel, or of several that are one after the other but for their latencies."""
        found = self.latency
        if self.flops_per_second is not None:
            found += flops / self.flops_per_second
        if self.bytes_per_second is not None:
            found += moved / self.bytes_per_second
        return found

    @property
    def spread(self) -> tuple[float, float]:
        """What a time may be, as factors."""
        low, high = SPREAD[self.source]
        return min(low, 1 - self.residual), max(high, 1 + self.residual)


def fit_work(points: Sequence[tuple[float, float, float]]) -> Work:
    """The best sum of terms, none of them negative, through (flops, bytes, seconds).

    A point weighs as the inverse of its time, so the residual is one of shares.
    """
    terms_N3 = np.array([(1.0, flops, moved) for flops, moved, _ in points])
    seconds_N = np.array([seconds for *_, seconds in points])
    terms_N3 = terms_N3 / seconds_N[:, None]
    best: tuple[float, dict[int, float]] | None = None
    for number in range(1, min(3, len(points)) + 1):
        for chosen in combinations(range(3), number):
            if not terms_N3[:, chosen].any(0).all():
                continue
            found_C, *_ = np.linalg.lstsq(terms_N3[:, chosen], np.ones(len(points)), rcond=None)
            residual = float(np.sqrt(((terms_N3[:, chosen] @ found_C - 1) ** 2).mean()))
            if (found_C > 0).all() and (best is None or residual < best[0] - 1e-6):
                best = residual, dict(zip(chosen, found_C.tolist(), strict=True))
    assert best is not None, "every kernel takes time"
    residual, of = best
    rates = [1 / of[term] if term in of else None for term in (1, 2)]
    return Work(rates[0], rates[1], of.get(0, 0.0), residual, "measured")


GB, GiB = 1e9, 2**30
# A kind of link, as of `carpool.layout.topology.Link`; a transport has the same name.
NVLINK: Final = "nvlink"
# Kinds of kernels on an H200, by its datasheet: (share of its peak, share of its memory's bandwidth, latency). Experts
# and attention are fitted to docs/measurements.md; "What experts compute" (residual 5 %), "Attention"; the others to
# the kinds of kernels of whole steps there ("Whole training steps of real configurations").
_KERNELS: Mapping[str, tuple[float | None, float | None, float]] = MappingProxyType({
    "dense": (0.79, 2.5, 3e-6),
    "experts": (0.770, 2.18, 280e-6),
    "experts backward": (0.765, 2.75, 400e-6),
    "attention 64": (0.45, None, 10e-6), "attention 64 backward": (0.32, None, 20e-6),
    "attention 128": (0.63, None, 10e-6), "attention 128 backward": (0.445, None, 20e-6),
    "attention 192": (0.60, None, 10e-6), "attention 192 backward": (0.42, None, 20e-6),
    "elementwise": (None, 0.84, 2e-6),
    "optimizer": (None, 0.80, 20e-6),
    "launch": (None, None, 7e-6),
    "host ride": (None, None, 3.6e-3),
})  # fmt: skip
# Of the bandwidth that rows reach over NVLink, what NCCL's all-gathers do.
_GATHERED = 0.72
# What an H200 reaches of its datasheet: rows pushed by 16 CTAs, and grouped products of docs/measurements.md.
REACHED_NVLINK, REACHED_FLOPS = 320 / 450, 500 / 989


@dataclass(frozen=True)
class LinkRate:
    """One kind of link, as one rank sees it.

    Attributes:
        bytes_per_second: that a rank sends, and at the same time receives.
        latency: seconds that a ride takes with nothing to carry.
    """

    bytes_per_second: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """What the cost model knows of a machine.

    Attributes:
        flops: floating-point operations per second that the experts' matrix products reach, in bfloat16.
        nvlink: GPUs joined by NVLink; None: this device has none.
        node: ranks of one node without NVLink: PCIe, or the memory of a CPU.
        network: ranks of different nodes.
        peak_flops: dense bfloat16 without sparsity, from the datasheet; None if there is none.
        source: where the rates are from, for people.
        memory: bytes per second between the device and its memory, from the datasheet or measured; None if that is not
            known.
        capacity: bytes of that memory, as PyTorch sees them; None if that is not known.
        host: copies between the device and host memory, the slower way; None: as `node`.
        disk: of the folder where runs are written, reads and writes alike; None if that is not known.
        shared_network: whether the ranks of a node share one port. `network` is then what each has while all send.
        network_alone: between nodes, of a rank while the others of its node send nothing, both ways at once; asked for
            where a port is shared. None: not measured.
        push: between GPUs of an NVLink domain by copies that no multiprocessor makes: the ceiling of transport nvlink.
            None: not measured.
        gathered: an all-gather of NCCL inside a node, by bytes that a rank receives. None: as `nvlink`.
        kernels: how long kinds of kernels take, as far as that was measured on this device.
        peak_float32: as `peak_flops`, of float32 without TF32, as PyTorch multiplies it by default. None: kernels of
            float32 are as fast as the others (CPUs are measured with them).
    """

    name: str
    flops: float
    nvlink: LinkRate | None
    node: LinkRate
    network: LinkRate
    peak_flops: float | None
    source: str
    memory: float | None = None
    capacity: float | None = None
    host: LinkRate | None = None
    disk: LinkRate | None = None
    shared_network: bool = False
    network_alone: LinkRate | None = None
    push: LinkRate | None = None
    gathered: LinkRate | None = None
    kernels: Mapping[str, Work] = field(default_factory=dict)
    peak_float32: float | None = None

    @property
    def host_link(self) -> LinkRate:
        """Between the device and host memory."""
        return self.node if self.host is None else self.host

    @property
    def node_link(self) -> str:
        """The kind of link between the GPUs of a node."""
        return "node" if self.nvlink is None else NVLINK

    def rate(self, link: str) -> LinkRate:
        """Of a kind of link (`carpool.layout.topology.Link`)."""
        found: LinkRate | None = getattr(self, link)
        return self.node if found is None else found

    def kernel(self, name: str, element: int = 2) -> Work:
        """How long a kind of kernel takes: as measured on this device, or by the share of the datasheet of an H200.

        Args:
            element: bytes in which it computes; of 4, the same share of the datasheet's float32 is assumed."""
        work = self._kernel(name)
        if element == 2 or work.flops_per_second is None or self.peak_float32 is None or self.peak_flops is None:
            return work
        flops = work.flops_per_second * self.peak_float32 / self.peak_flops
        return replace(work, flops_per_second=flops, source="assumed")

    def _kernel(self, name: str) -> Work:
        if name in self.kernels:
            return self.kernels[name]
        flops, moved, latency = _KERNELS[name]
        peak = self.peak_flops or self.flops / REACHED_FLOPS
        memory = self.memory or peak / 200
        source: Source = "assumed" if self.peak_flops is None else "fitted" if self.name == "H200" else "datasheet"
        return Work(
            None if flops is None else flops * peak, None if moved is None else moved * memory, latency, 0.0, source
        )

    @property
    def gather_link(self) -> LinkRate:
        """NCCL's all-gathers inside a node."""
        if self.gathered is not None:
            return self.gathered
        if self.nvlink is None:
            return self.node
        return LinkRate(_GATHERED * self.nvlink.bytes_per_second, 30e-6)

    def link_source(self, link: str) -> Source:
        """Where the rate of a kind of link is from: a file of `carpool doctor --measure` says what it lacks."""
        if self.source.startswith("measured"):
            return "assumed" if link in self.source.partition(";")[2] else "measured"
        return "assumed" if link == "network" or self.source.startswith("assumed") else "datasheet"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Hardware:
        links = {key: None if settings.get(key) is None else LinkRate(**settings[key]) for key in _LINKS}
        kernels = {name: Work(**one) for name, one in (settings.get("kernels") or {}).items()}  # earlier files: none
        return cls(**{**settings, **links, "kernels": kernels})


_LINKS = (NVLINK, "node", "network", "host", "disk", "push", "gathered", "network_alone")


def _datasheet(
    name: str,
    peak: float,
    memory: float,
    capacity: float,
    nvlink: float | None,
    pcie: float,
    float32: float,
    network: float = 50 * GB,
) -> Hardware:
    """`peak`, `float32`: dense bfloat16, and float32 without TF32; `capacity`: bytes; the others: bytes per second, of
    links in one direction."""
    return Hardware(
        name=name,
        flops=REACHED_FLOPS * peak,
        nvlink=None if nvlink is None else LinkRate(REACHED_NVLINK * nvlink, 12e-6),
        node=LinkRate(REACHED_NVLINK * pcie, 20e-6),
        network=LinkRate(network, 30e-6),
        peak_flops=peak,
        source=f"datasheet of {name}, times what an H200 reaches of its own; network assumed",
        memory=memory,
        capacity=capacity,
        peak_float32=float32,
    )


_H200 = Hardware(
    name="H200",
    flops=500e12,
    nvlink=LinkRate(320 * GB, 12e-6),
    node=LinkRate(REACHED_NVLINK * 64 * GB, 20e-6),
    network=LinkRate(50 * GB, 30e-6),
    peak_flops=989e12,
    source="measured (docs/measurements.md); network assumed",
    memory=4800 * GB,
    capacity=139 * GiB,
    peak_float32=67e12,
)
# By a pattern of the device's name; the first that fits counts. Vendors give both directions of NVLink and PCIe
# together, so half of it stands here. The figures (dense TFLOP/s; GB/s), and who quotes them from the vendor's page:
#   H100             989, NVLink 900, PCIe 128   white paper; glennklockwood.com/garden/processors/h100
#   H800             an H100 with NVLink 400 (DeepSeek-V3, arXiv 2412.19437, section 3.1: 160 GB/s reached)
#   H100 PCIe, NVL   756, 835                    nvidia.com/en-us/data-center/h100; torchtitan/tools/utils.py
#   B200             2,250, NVLink 1,800         datasheet 3384703; torchtitan, same site, processors/B200
#                    PCIe                        assumed to be an H100's
#   GB200            2,500, NVLink 1,800 among the 72 of a rack (--gpus-per-node 72, or 64 of them), 900 to the CPU of
#                    two GPUs; datasheet of GB200 NVL72
#   A100             312, NVLink 600, PCIe 64    datasheet 1758950; glennklockwood.com/garden/processors/A100
#   L40S             362, PCIe 64, no NVLink     datasheet 28413; torchtitan, itcreations.com
#   RTX              A6000 155, 3090 71, 4090 165, 5090 210, with sums in float32: the vendor's architecture papers
#   MI300X           1,300                       amd.com/en/products/accelerators/instinct/mi300/mi300x.html; torchtitan
#                    7 links of 128, PCIe 128    emergentmind.com/topics/amd-mi300x-gpu, MLPerf's system descriptions
#   float32          without TF32: H100 67, PCIe 51, NVL 60, A100 19.5, L40S 91.6, B200 75, GB200 80, MI300X 163.4: the
#                    vendors' datasheets
#   capacity         as PyTorch says of H100, A100, H200 and RTX; else GB in products' names
#   memory           H100 3,350, H200 4,800, B200 8,000, A100 2,039, L40S 864, MI300X 5,300: llmbook.apartsin.com (G.1),
#                    modal.com/gpu-glossary; H100 PCIe 2,000, NVL 3,900, A100 PCIe 1,935: the vendor's datasheets
_PROFILES: tuple[tuple[str, Hardware], ...] = (
    (r"\bH200\b", _H200),
    (r"\bH100 PCIe", _datasheet("H100 PCIe", 756e12, 2000 * GB, 79 * GiB, None, 64 * GB, 51e12)),
    (r"\bH100 NVL", _datasheet("H100 NVL", 835e12, 3900 * GB, 94 * GB, None, 64 * GB, 60e12)),
    (r"\bH100\b", _datasheet("H100", 989e12, 3350 * GB, 79 * GiB, 450 * GB, 64 * GB, 67e12)),
    (r"\bH800\b", _datasheet("H800", 989e12, 3350 * GB, 79 * GiB, 200 * GB, 64 * GB, 67e12)),
    (r"\bGB200\b", _datasheet("GB200", 2500e12, 8000 * GB, 186 * GB, 900 * GB, 225 * GB, 80e12)),
    (r"\bB200\b", _datasheet("B200", 2250e12, 8000 * GB, 180 * GB, 900 * GB, 64 * GB, 75e12)),
    (r"\bA100.*PCIe", _datasheet("A100 PCIe", 312e12, 1935 * GB, 79 * GiB, None, 32 * GB, 19.5e12, 25 * GB)),
    (r"\bA100.*40GB", _datasheet("A100 40GB", 312e12, 1555 * GB, 39.4 * GiB, 300 * GB, 32 * GB, 19.5e12, 25 * GB)),
    (r"\bA100\b", _datasheet("A100", 312e12, 2039 * GB, 79 * GiB, 300 * GB, 32 * GB, 19.5e12, 25 * GB)),
    (r"\bL40S\b", _datasheet("L40S", 362e12, 864 * GB, 48 * GB, None, 32 * GB, 91.6e12, 25 * GB)),
    (r"\bRTX A6000", _datasheet("RTX A6000", 155e12, 768 * GB, 47.4 * GiB, None, 32 * GB, 38.7e12, 25 * GB)),
    (r"\bRTX 3090", _datasheet("RTX 3090", 71e12, 936 * GB, 23.6 * GiB, None, 32 * GB, 35.6e12, 25 * GB)),
    (r"\bRTX 4090", _datasheet("RTX 4090", 165e12, 1008 * GB, 23.6 * GiB, None, 32 * GB, 82.6e12, 25 * GB)),
    (r"\bRTX 5090", _datasheet("RTX 5090", 210e12, 1792 * GB, 31.3 * GiB, None, 64 * GB, 104.8e12, 25 * GB)),
    (r"\bMI300X\b", _datasheet("MI300X", 1300e12, 5300 * GB, 192 * GB, 448 * GB, 64 * GB, 163.4e12)),
)
# Of a few cores, where ranks are processes of one thread that talk over gloo.
CPU = Hardware(
    "cpu", 5e9, None, LinkRate(1e9, 2e-5), LinkRate(1e8, 1e-4), None, "assumed: no rates are kept for CPUs", 10 * GB
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType({**{one.name: one for _, one in _PROFILES}, "cpu": CPU})
# What `carpool place` and the recipes take where no device is at hand.
DEFAULT = _H200


def hardware_of(device: str) -> Hardware:
    """The profile for a device.

    Args:
        device: its name as `torch.cuda.get_device_name` gives it, or "cpu".

    Returns:
        For an unknown GPU, an A100 without NVLink whose `source` says that it is assumed.
    """
    if device.startswith("cpu"):
        return CPU
    for pattern, profile in _PROFILES:
        if re.search(pattern, device, re.IGNORECASE):
            return profile
    like = HARDWARE["A100 PCIe"]
    return Hardware(
        device, like.flops, like.nvlink, like.node, like.network, None, f"assumed: no rates are known for {device}"
    )


def find_hardware(name: str) -> Hardware:
    """What `parallelism.hardware` and `--hardware` name: a profile, whatever the case, or a file of
    `carpool doctor --measure`.

    Raises:
        ValueError: no such profile, or a file that is not there or not of this kind."""
    for one, profile in HARDWARE.items():
        if one.lower() == name.lower():
            return profile
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise ValueError(
            f"hardware {name!r} is not known{did_you_mean(name.upper(), HARDWARE)}; known are "
            f"{', '.join(HARDWARE)}, and files of 'carpool doctor --measure' (*.json)"
        )
    try:
        return Hardware.from_dict(json.loads(path.read_text())["hardware"])
    except OSError as error:
        raise ValueError(f"hardware {name}: {error.strerror}; 'carpool doctor --measure' writes such a file") from None
    except UnicodeDecodeError:
        raise ValueError(f"hardware {name} is not text: 'carpool doctor --measure' writes such a file") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"hardware {name} is no whole JSON file (line {error.lineno}: {error.msg}): write it again with 'carpool "
            "doctor --measure'"
        ) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"hardware {name} is not what 'carpool doctor --measure' of this version writes ({error}): measure again"
        ) from None
