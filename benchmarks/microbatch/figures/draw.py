"""Draws mu-cuDNN's figures (003, 004) from committed results: SVG files, and their numbers as JSON.

    python benchmarks/microbatch/figures/draw.py            # into docs/figures and benchmarks/results/microbatch
    python benchmarks/microbatch/figures/draw.py --out DIR  # elsewhere

Times are an H200's, kernel by kernel (`benchmarks/microbatch/gpu_tables.py`), added up where a figure has a network;
those of figure 13 (004) are DeepBench's published ones.  No device is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from benchmarks.microbatch.figures import charts, data  # noqa: E402
from benchmarks.networks.bar_chart import bar_chart  # noqa: E402

NUMBERS = "microbatch_figures_h200_2026-11-22.json"
FOLDERS = ROOT / "docs" / "figures", ROOT / "benchmarks" / "results" / "microbatch"


def numbers() -> dict[str, Any]:
    """Every figure's numbers."""
    times = data.Times()
    return {
        "device": times.device.name,
        "one byte less": data.one_byte_less(times),
        "layers": data.layers(times),
        "layer memory": data.layer_memory(times),
        "conv2": data.conv2(times),
        "policies": data.policies(times),
        "totals": data.totals(times),
        "division": data.division(times),
        "activations": data.activations(times),
        "DeepBench by filter": data.by_filter(times),
        "half arithmetic": data.half_arithmetic(times),
        "heterogeneous": data.heterogeneous(),
    }


def drawings(found: dict[str, Any]) -> dict[str, str]:
    """SVG text by file name."""
    return {
        "microbatch_one_byte_less.svg": _one_byte_less(found["one byte less"]),
        "microbatch_layers.svg": _layers(found["layers"]),
        "microbatch_layer_memory.svg": _layer_memory(found["layer memory"]),
        "microbatch_conv2_front.svg": _fronts(found["conv2"]),
        "microbatch_conv2_policies.svg": _conv2_policies(found["conv2"]),
        "microbatch_policies.svg": _policies(found["policies"]),
        "microbatch_wd_totals.svg": _totals(found["totals"]),
        "microbatch_wd_division.svg": _division(found["division"]),
        "microbatch_activations.svg": _activations(found["activations"]),
        "microbatch_deepbench_filters.svg": _by_filter(found["DeepBench by filter"]),
        "microbatch_heterogeneous.svg": _heterogeneous(found["heterogeneous"]),
    }


def _one_byte_less(found: dict[str, Any]) -> str:
    names = ("one byte less ms", "divided, one byte less ms", "best ms")
    series = ("1 byte less", "1 byte less, divided", "best")
    return charts.below(
        *(
            bar_chart(
                f"AlexNet forward, batch 256, {mode}, H200: the best call's workspace, and one byte less",
                " ms",
                series,
                [(f"{layer} ({row['workspace MiB']:.0f} MiB)", [row[n] for n in names]) for layer, row in rows.items()],
            )
            for mode, rows in found.items()
        )
    )


def _layers(found: dict[str, Any]) -> str:
    series = [f"{how}, {limit} MiB" for limit in data.LIMITS for how in ("single", "WR")]
    time = [(layer, [row[name]["ms"] for name in series]) for layer, row in found.items()]
    space = [(layer, [row["data MiB"] + row[name]["workspace MiB"] for name in series]) for layer, row in found.items()]
    title = "AlexNet's convolutions, batch 256, float32 HIGHEST, H200"
    return charts.below(
        bar_chart(f"{title}: images, results, filters, largest workspace", " MiB", series, space),
        bar_chart(f"{title}: forward and backward", " ms", series, time),
    )


def _layer_memory(found: dict[str, Any]) -> str:
    series = ("without workspace", "single calls, 512 MiB", "WR, 64 MiB")
    made = []
    for network, row in found.items():
        groups = []
        for name, layer in row["layers"].items():
            short = name.split(",")[0].removeprefix("forward ")
            sizes = [layer["data"], layer["data"] + layer["single"], layer["data"] + layer["WR"]]
            groups.append((short[:42], [size / data.MIB for size in sizes]))
        title = f"{network}, float32 HIGHEST, H200: memory of layers (1/{row['most']:.2f} at best)"
        made.append(bar_chart(title, " MiB", series, groups))
    return charts.below(*made)


def _fronts(found: dict[str, Any]) -> str:
    made = []
    for mode, row in found.items():
        points = [(x, y, text.replace("cudnn/", "").split(":")[0][:30]) for x, y, text in row["front"]]
        title = f"AlexNet's conv2 forward, batch 256, {mode}, H200: {len(points)} desirable divisions within 120 MiB"
        made.append(charts.front(title, points))
    return charts.below(*made)


def _conv2_policies(found: dict[str, Any]) -> str:
    return charts.below(
        *(
            charts.timeline(
                f"AlexNet's conv2 forward, batch 256, {mode}, 64 MiB, H200: micro-batches",
                [(f"{name} ({p['workspace MiB']:.0f} MiB)", p["parts"]) for name, p in row["policies"].items()],
            )
            for mode, row in found.items()
        )
    )


def _by_mode(
    found: dict[str, Any], title: str, legend: Sequence[str], values: Callable[[dict[str, Any]], list[Any]]
) -> str:
    """A bar chart of milliseconds for each precision, below each other. Args: values: of a row's bars."""
    return charts.below(
        *(
            bar_chart(
                f"{title}, {mode}, H200: kernels' times added up",
                " ms",
                tuple(legend),
                [(key, values(row)) for key, row in rows.items()],
            )
            for mode, rows in found.items()
        )
    )


def _policies(found: dict[str, Any]) -> str:
    names = ("undivided", "powerOfTwo", "all")
    title = "Convolutions of a training step"
    return _by_mode(found, title, names, lambda row: [row[name]["ms"] for name in names])


def _totals(found: dict[str, Any]) -> str:
    names = ("WR undivided ms", "WR ms", "WD ms")
    title, legend = "WR and WD with equal memory in all", ("WR, single calls", "WR", "WD")
    return _by_mode(found, title, legend, lambda row: [row[name] for name in names])


def _activations(found: dict[str, Any]) -> str:
    names = ("equal limits, undivided ms", "equal limits ms", "together ms")
    title = "Memory for activations and workspaces"
    legend = ("equal limits, single calls", "equal limits", "what each step leaves")
    return _by_mode(found, title, legend, lambda row: [row[name] for name in names])


def _division(found: dict[str, Any]) -> str:
    made = []
    for mode, row in found.items():
        groups = [(name, [k["WR MiB"], k["WD MiB"]]) for name, k in row["kernels"].items()]
        title = f"AlexNet, {mode}, H200: conv2 and conv3 have {100 * row['of conv2 and conv3']:.1f} % of WD's workspace"
        made.append(bar_chart(title, " MiB", ("single calls, 8 MiB each", "WD, 120 MiB"), groups))
    return charts.below(*made)


def _by_filter(found: dict[str, Any]) -> str:
    sizes = sorted({size for rows in found.values() for size in rows}, key=lambda s: [int(n) for n in s.split("x")])
    groups = []
    for size in sizes:
        count = max(len(rows.get(size, ())) for rows in found.values())
        groups.append((f"{size}, {count} layers", [rows.get(size, []) for rows in found.values()]))
    title = "DeepBench forward, 4 times its batch, 64 MiB, H200: gain over single calls (least, mean, largest)"
    return charts.whiskers(title, tuple(found), groups)


def _heterogeneous(found: dict[str, Any]) -> str:
    groups = [
        (f"{name.replace(' +', ',')}: {', '.join(map(str, row['sizes']))}", [row["even ms"], row["ms"]])
        for name, row in found.items()
    ]
    title = "32 samples of two DeepSpeech convolutions, training, published float32 times"
    return bar_chart(title, " ms", ("even split", "best split"), groups)


def main() -> int:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the drawings and the numbers")
    options = parser.parse_args()
    pictures, results = (options.out, options.out) if options.out else FOLDERS
    found = numbers()
    (results / NUMBERS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, text in drawings(found).items():
        (pictures / name).write_text(text, encoding="utf-8")
        print(pictures / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
