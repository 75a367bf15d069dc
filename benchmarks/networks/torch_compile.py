"""The networks of `on_gpu.py` in torch, compiled with CUDA graphs, channels last, TF32 on, random weights.

    python benchmarks/networks/torch_compile.py MobileNetV2:64 bert:8 ResNet50:1:bfloat16 --mode max-autotune

Convolutional networks are torchvision's, BERT is that of `transformers`. Prints one line of JSON per network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

TORCH = {
    "MobileNetV2": "mobilenet_v2",
    "ResNet50": "resnet50",
    "DenseNet121": "densenet121",
    "InceptionV3": "inception_v3",
}
ROUNDS = 15
STREAM = 20


def model_of(name: str, batch: int, half: bool) -> tuple[Any, Any]:
    """A network and its input, on the GPU."""
    import torch  # pyright: ignore[reportMissingImports]

    kind = torch.bfloat16 if half else torch.float32
    if name == "bert":
        import transformers  # pyright: ignore[reportMissingImports]

        bert = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).eval().cuda().to(kind)
        return (lambda x: bert(x).last_hidden_state), torch.randint(0, 30522, (batch, 384), device="cuda")
    import torchvision  # pyright: ignore[reportMissingImports]

    size = 299 if name == "InceptionV3" else 224
    more = {"init_weights": False} if name == "InceptionV3" else {}
    model = getattr(torchvision.models, TORCH[name])(weights=None, **more).eval().cuda().to(kind)
    x = torch.randn(batch, 3, size, size, device="cuda", dtype=kind)
    return model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


def compile_in_threads() -> None:
    """Has inductor compile the choices of its autotuner in threads of this process, all side by side.

    Kernels from its worker processes are compiled again, one by one, when they are timed (torch 2.11: 15 s for 20
    choices of a product, 60 to 80 s of a convolution).  What it chooses from is the same.
    """
    from torch._inductor.async_compile import AsyncCompile  # pyright: ignore[reportMissingImports]
    from torch._inductor.select_algorithm import AlgorithmSelectorCache  # pyright: ignore[reportMissingImports]

    make, ready = AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.__dict__["use_process_pool"]

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        AsyncCompile.use_process_pool = classmethod(lambda cls: False)
        try:
            return make(*args, **kwargs)
        finally:
            AsyncCompile.use_process_pool = ready

    AlgorithmSelectorCache.make_precompile_fn = in_threads


def measure(spec: str, seconds: float, mode: str = "reduce-overhead") -> dict[str, Any]:
    """Seconds per call of one network (median and quartiles), waited for one by one and back to back."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    name, batch, *rest = spec.split(":")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    model, x = model_of(name, int(batch), "bfloat16" in rest)
    result: dict[str, Any] = {"torch": torch.__version__, "mode": mode}
    if mode.startswith("max-autotune"):
        compile_in_threads()
    with torch.no_grad():
        run = torch.compile(model, mode=mode)
        start = time.perf_counter()
        for _ in range(4):
            run(x)
        torch.cuda.synchronize()
        result["compile_seconds"] = time.perf_counter() - start
        step: list[float] = []
        stream: list[float] = []
        begin = time.perf_counter()
        while len(step) < ROUNDS and time.perf_counter() - begin < seconds:
            few = []
            for _ in range(10):
                start = time.perf_counter()
                run(x)
                torch.cuda.synchronize()
                few.append(time.perf_counter() - start)
            step.append(sorted(few)[5])
            start = time.perf_counter()
            for _ in range(STREAM):
                run(x)
            torch.cuda.synchronize()
            stream.append((time.perf_counter() - start) / STREAM)
    quartiles = {"step": step, "stream": stream}
    return {**result, **{k: [float(np.quantile(v, q)) for q in (0.5, 0.25, 0.75)] for k, v in quartiles.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help="NAME:BATCH, then perhaps :bfloat16")
    parser.add_argument("--mode", default="reduce-overhead", help="of torch.compile, e.g. max-autotune")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing per network")
    options = parser.parse_args(arguments)
    for spec in options.networks:
        found = {"network": spec, **measure(spec, options.seconds, options.mode)}
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
