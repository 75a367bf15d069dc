"""Registry of workloads: networks of 2015 to 2020 (convolutions, recurrence, embeddings, BERT) and today's."""

from __future__ import annotations

from functools import partial

from .attention_rnn import attention_rnn, attention_rnn_training
from .bert import bert_large, bert_large_training
from .decoder import decode, prefill
from .deepspeech import deepspeech2, deepspeech2_training
from .dlrm import dlrm, dlrm_training
from .gpt import gpt_training
from .keras_cnn import cnn, cnn_training
from .spec import Program, WorkloadSpec
from .unet import unet_block
from .vision_transformer import swin, vit
from .whisper import whisper_encoder

CNN_BATCHES = (1, 8, 64, 128)


def specs() -> list[WorkloadSpec]:
    """All workloads."""
    found = []
    for name in ("ResNet50", "DenseNet121", "MobileNetV2", "InceptionV3"):
        found += [
            WorkloadSpec(name, "cnn", CNN_BATCHES, "inference", partial(cnn, name), has_statistics=True),
            WorkloadSpec(
                f"{name}_training", "cnn", (64,), "training", partial(cnn_training, name), has_statistics=True
            ),
        ]
    for name in ("EfficientNetB0", "ConvNeXtTiny"):
        statistics = name == "EfficientNetB0"
        builder = partial(cnn, name) if statistics else partial(_without_statistics, name)
        found.append(WorkloadSpec(name, "cnn", (1, 64), "inference", builder, has_statistics=statistics))
    return [
        *found,
        WorkloadSpec("DeepSpeech2", "rnn", (1, 16), "inference", deepspeech2, has_statistics=True),
        WorkloadSpec("DeepSpeech2_training", "rnn", (16,), "training", deepspeech2_training, has_statistics=True),
        WorkloadSpec("AttentionRNN", "rnn", (1, 64), "inference", attention_rnn),
        WorkloadSpec("AttentionRNN_training", "rnn", (64,), "training", attention_rnn_training),
        WorkloadSpec("DLRM", "mlp", (1, 2048), "inference", dlrm),
        WorkloadSpec("DLRM_training", "mlp", (2048,), "training", dlrm_training),
        WorkloadSpec("BERT_large", "transformer", (1, 8), "inference", bert_large),
        WorkloadSpec("BERT_large_training", "transformer", (8,), "training", bert_large_training),
        WorkloadSpec("ViT_B16", "transformer", (1, 64), "inference", vit),
        WorkloadSpec("Swin_T", "transformer", (1, 64), "inference", swin),
        WorkloadSpec("UNet_block", "diffusion", (1, 8), "inference", unet_block),
        WorkloadSpec("Llama_prefill", "decoder", (1,), "inference", prefill),
        WorkloadSpec("Llama_decode", "decoder", (1, 8), "decode", decode),
        WorkloadSpec("Whisper_tiny_encoder", "transformer", (1, 8), "inference", whisper_encoder),
        WorkloadSpec("GPT_training", "transformer", (8,), "training", gpt_training),
    ]


def _without_statistics(name: str, batch: int, dtype: str, tiny: bool = False) -> Program:
    return cnn(name, batch, dtype, tiny)


WORKLOADS = {spec.name: spec for spec in specs()}
"""By name."""
