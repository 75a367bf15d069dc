"""Networks ranked for GPUs that are not here: kernels assembled, PTX written, candidates ranked by PUL.

    python benchmarks/networks/offline_ranking.py --out results  # RTX 2080 and V100, four networks
    python benchmarks/networks/offline_ranking.py --out results --arch rtx2080 MobileNetV2

Nothing runs; the compilers of ``jcuts[cuda13]`` are needed.  ``OUT/rank_networks.json`` counts distinct operations,
those with kernels for the GPU, kernels that were assembled or rejected (spills), PTX files, and says what kept the
GPU's own code from being made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
NETWORKS = ("MobileNetV2", "ResNet50", "DenseNet121", "InceptionV3")


def ranked(network: str, arch: str, limit: int) -> dict[str, Any]:
    """Counts of one network on one GPU."""
    from benchmarks.networks import workloads
    from jcuts.arch.load import load_gpu
    from jcuts.pipeline import offline_ranking

    fn, args = workloads.network(network, 1, closed=True)
    start = time.perf_counter()
    found = offline_ranking.rank(fn, *args, arch=load_gpu(arch), limit=limit)
    usable = [o for o in found.operations if any(not c.rejected for c in o.candidates)]
    kernels = [c for o in found.operations for c in o.candidates]
    with tempfile.TemporaryDirectory() as folder:
        files = len(offline_ranking.write_ptx(found, Path(folder))) if found.why is None else 0
    return {
        "network": network,
        "arch": arch,
        "target": found.target,
        "not_assembled": found.why and found.why.message,
        "operations": len(found.operations),
        "with_kernels": len(usable),
        "occurrences": sum(o.count for o in found.operations),
        "occurrences_with": sum(o.count for o in usable),
        "kernels": sum(not c.rejected for c in kernels),
        "rejected": sum(bool(c.rejected) for c in kernels),
        "refusals": sorted({str(o.refused) for o in found.operations if o.refused is not None}),
        "ptx_files": files,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--out", type=Path, default=Path("rank_networks"))
    parser.add_argument("--arch", nargs="+", default=["rtx2080", "v100"], help="shipped names, or TOML files")
    parser.add_argument("--limit", type=int, default=2, help="candidates per operation")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for arch in options.arch:
        for network in options.networks:
            rows.append(ranked(network, arch, options.limit))
            print(json.dumps(rows[-1]), flush=True)
            (options.out / "rank_networks.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
