"""Model configurations of the planner: presets and TOML files, expanded into the layers that the cost model prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from jcuts.base.errors import ModelError, UsageError
from jcuts.plan.spec import convnets, recommenders, speech, toml_file
from jcuts.plan.spec.layers import BYTES, Model, embedding, transformer_layer, vocabulary_head


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer.  ``ffn=0`` is 4 hidden, ``kv_heads=0`` is heads; ``batch`` is the usual global batch in
    sequences.

    ``flash``: attention never writes its scores.  ``vocabulary_divided``: the tensor axis divides embedding and logits.
    ``experts``/``chosen``: mixture of experts in every layer.  ``causal``: a decoder, which can generate; encoders
    cannot.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    ffn: int = 0
    kv_heads: int = 0
    batch: int = 1
    gated: bool = False
    flash: bool = False
    dropout: bool = True
    tied: bool = True
    positions: bool = True
    vocabulary_divided: bool = True
    experts: int = 1
    chosen: int = 1
    causal: bool = True

    def build(self) -> Model:
        """The blocks of the network.

        Raises: ModelError if a size is not positive or hidden does not divide into heads.
        """
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "batch", "experts", "chosen"):
            if getattr(self, name) < 1:
                raise ModelError(
                    f"model {self.name}: {name}={getattr(self, name)} must be at least 1", model=self.name, key=name
                )
        if self.hidden % self.heads:
            raise ModelError(
                f"model {self.name}: hidden={self.hidden} does not divide into {self.heads} heads",
                model=self.name,
                key="heads",
            )
        if self.chosen > self.experts:
            raise ModelError(
                f"model {self.name}: {self.chosen} of {self.experts} experts cannot be chosen",
                model=self.name,
                key="chosen",
            )
        kv_heads = self.kv_heads or self.heads
        ffn = self.ffn or 4 * self.hidden
        head_size = self.hidden // self.heads
        layer = transformer_layer(
            hidden=self.hidden,
            ffn=ffn,
            heads=self.heads,
            kv_heads=kv_heads,
            sequence=self.sequence,
            count=self.layers,
            gated=self.gated,
            flash=self.flash,
            dropout=self.dropout,
            experts=self.experts,
            chosen=self.chosen,
            head_size=head_size,
        )
        vocabulary = -(-self.vocabulary // 128) * 128  # padded so that the tensor axis divides it
        positions = self.sequence if self.positions else 0
        edges = {"hidden": self.hidden, "vocabulary": vocabulary, "sequence": self.sequence}
        divided = self.vocabulary_divided
        return Model(
            name=self.name,
            blocks=(layer,),
            embed=embedding(positions=positions, divided=divided, **edges),
            head=vocabulary_head(divided=divided, **edges),
            tied=self.tied,
            batch=self.batch,
            tensor_limit=kv_heads,
            context_limit=self.sequence // 128 or 1,
            experts=self.experts,
            hidden=self.hidden,
            sequence=self.sequence,
            cache_bytes=2.0 * BYTES * kv_heads * head_size * self.layers * self.causal,
            details=asdict(self),
        )


_T = Transformer
_LLAMA = {"gated": True, "flash": True, "dropout": False, "tied": False, "positions": False}
"""SwiGLU, attention in one kernel, rotary positions, a head of its own: what Llama and Mixtral have in common."""
_PRESETS: dict[str, Transformer] = {
    preset.name: preset
    for preset in (
        # GPT-3 paper (arXiv 2005.14165) table 2.1; 3.2 M tokens a batch for 175B.
        _T("gpt3-125m", 12, 768, 12, 2048, 50257, batch=256),
        _T("gpt3-350m", 24, 1024, 16, 2048, 50257, batch=256),
        _T("gpt3-1.3b", 24, 2048, 16, 2048, 50257, batch=512),
        _T("gpt3-2.7b", 32, 2560, 32, 2048, 50257, batch=512),
        _T("gpt3-6.7b", 32, 4096, 32, 2048, 50257, batch=1024),
        _T("gpt3-13b", 40, 5120, 40, 2048, 50257, batch=1024),
        _T("gpt3-175b", 96, 12288, 96, 2048, 50257, batch=1536),
        # Turing-NLG (Microsoft, 2020): 78 layers, hidden 4256, 28 heads, sequence 1024, batch 512.
        _T("turing-nlg-17b", 78, 4256, 28, 1024, 50257, batch=512),
        # Megatron models of arXiv 2205.05198 table 3.
        _T("megatron-22b", 48, 6144, 64, 2048, 51200, batch=4),
        _T("turing-530b", 105, 20480, 128, 2048, 51200, batch=280),
        _T("megatron-1t", 128, 25600, 160, 2048, 51200, batch=512),
        # BERT (arXiv 1810.04805) at sequence 512.
        _T("bert-base", 12, 768, 12, 512, 30522, batch=256, causal=False),
        _T("bert-large", 24, 1024, 16, 512, 30522, batch=256, causal=False),
        # OPT (arXiv 2205.01068) table 1.
        _T("opt-1.3b", 24, 2048, 32, 2048, 50272, batch=512, dropout=False),
        _T("opt-6.7b", 32, 4096, 32, 2048, 50272, batch=1024, dropout=False),
        _T("opt-30b", 48, 7168, 56, 2048, 50272, batch=2048, dropout=False),
        _T("opt-175b", 96, 12288, 96, 2048, 50272, batch=1024, dropout=False),
        # Llama 2 and 3 (arXiv 2307.09288, 2407.21783).
        _T("llama2-7b", 32, 4096, 32, 4096, 32000, ffn=11008, batch=1024, **_LLAMA),
        _T("llama3-8b", 32, 4096, 32, 8192, 128256, ffn=14336, kv_heads=8, batch=512, **_LLAMA),
        _T("llama3-70b", 80, 8192, 64, 8192, 128256, ffn=28672, kv_heads=8, batch=512, **_LLAMA),
        # Mixtral 8x7B (arXiv 2401.04088).
        _T("mixtral-8x7b", 32, 4096, 32, 4096, 32000, ffn=14336, kv_heads=8, batch=1024, experts=8, chosen=2, **_LLAMA),
    )
}


def _transformer(table: toml_file.Table, sequence: int | None, flash: bool) -> Model:
    sizes = from_table(table)
    sizes = sizes if sequence is None else replace(sizes, sequence=sequence)
    return replace(sizes, flash=sizes.flash or flash).build()


KINDS: dict[str, Callable[[toml_file.Table], Model]] = {
    "convnet": convnets.from_table,
    "dlrm": recommenders.from_table,
    "speech": speech.from_table,
}
"""Kinds of networks besides ``transformer``: what makes a model of a TOML file by its ``kind``."""


def _files() -> dict[str, Path]:
    """TOML files of the networks that are no transformers."""
    folder = Path(str(resources.files("jcuts.plan") / "data" / "models"))
    return {path.stem: path for path in folder.glob("*.toml")}


def presets() -> list[str]:
    """Names of the models that come with the package."""
    return sorted([*_PRESETS, *_files()])


def preset(name: str) -> Transformer:
    """The sizes of a transformer preset.  Raises: UsageError with the nearest name."""
    if name not in _PRESETS:
        raise UsageError(f"model {name!r} is unknown{toml_file.nearest(name, presets())}", name=name)
    return _PRESETS[name]


def load(name_or_path: str, *, sequence: int | None = None, flash: bool = False) -> Model:
    """A preset by name, or a TOML file by path; ``sequence`` overrides the length, ``flash`` makes
    attention one kernel that keeps no scores.

    Raises: UsageError (unknown preset, with the nearest), ModelError (malformed file, with file, line and key).
    """
    files = _files()
    if name_or_path in files:
        table = toml_file.read(files[name_or_path])
    elif name_or_path.endswith(".toml") or "/" in name_or_path:
        table = toml_file.read(name_or_path)
    else:
        sizes = preset(name_or_path)
        sizes = sizes if sequence is None else replace(sizes, sequence=sequence)
        return replace(sizes, flash=sizes.flash or flash).build()
    kind = table.text_of("kind", "transformer", choices=("transformer", *KINDS))
    if kind == "transformer":
        return _transformer(table, sequence, flash)
    if sequence is not None:
        raise UsageError(f"{name_or_path} has no sequence", sequence=sequence)
    if flash:
        raise UsageError(f"{name_or_path} has no attention", flash=flash)
    return KINDS[kind](table)


def from_table(table: toml_file.Table) -> Transformer:
    """A transformer from its TOML table; keys are the fields of ``Transformer``."""
    made = Transformer(
        name=table.text_of("name", Path(table.path).stem),
        layers=table.integer("layers"),
        hidden=table.integer("hidden"),
        heads=table.integer("heads"),
        sequence=table.integer("sequence"),
        vocabulary=table.integer("vocabulary"),
        ffn=table.integer("ffn", 0, zero=True),
        kv_heads=table.integer("kv_heads", 0, zero=True),
        batch=table.integer("batch", 1),
        gated=table.flag("gated", False),
        flash=table.flag("flash", False),
        dropout=table.flag("dropout", True),
        tied=table.flag("tied", True),
        positions=table.flag("positions", True),
        vocabulary_divided=table.flag("vocabulary_divided", True),
        experts=table.integer("experts", 1),
        chosen=table.integer("chosen", 1),
        causal=table.flag("causal", True),
    )
    table.done()
    if made.hidden % made.heads:
        raise table.error("heads", f"must divide hidden={made.hidden}")
    if made.chosen > made.experts:
        raise table.error("chosen", f"must be at most experts={made.experts}")
    return made
