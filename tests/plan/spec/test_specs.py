"""Cluster and model specifications: presets, TOML, and every mistake named with file, line and key."""

import re

import pytest

from jcuts.base.errors import ModelError, UsageError
from jcuts.plan.spec import cluster, model, toml_file

GOOD = """name = "two"
[[nodes]]
count = 2
gpus = 4
[nodes.gpu]
peak_tflops = 100
memory_gib = 40
bandwidth_gbs = 1000
[intra]
bandwidth_gbs = 50
[inter]
bandwidth_gbs = 10
[host]
capacity_gib = 500
read_gbs = 20
write_gbs = 10
"""


def _load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return cluster.load(str(path))


def test_every_preset_loads_and_says_where_its_constants_are_from():
    assert {"thesis-a", "thesis-b", "thesis-c", "dgx-a100", "dgx-h100", "dgx-h200"} <= set(cluster.presets())
    for name in cluster.presets():
        found = cluster.load(name)
        assert found.gpus > 0 and found.gpu.memory > 0
        assert {"gpu", "gemm_efficiency"} <= set(found.sources), name


def test_a_file_is_read(tmp_path):
    found = _load(tmp_path, GOOD)
    assert found.gpus == 8 and found.gpu.peak == 100e12 and found.storage is None
    assert found.host is not None and (found.host.read, found.host.write) == (20e9, 10e9)


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("bandwidth_gbs = 50", "bandwidth_gbs = -50", 10, "intra.bandwidth_gbs"),
        ("bandwidth_gbs = 50\n", "", 9, "intra.bandwidth_gbs"),
        ("bandwidth_gbs = 1000", "bandwith_gbs = 1000", 5, "nodes.gpu.bandwidth_gbs"),
        ("gpus = 4", "gpus = 0", 4, "nodes.gpus"),
        ("gpus = 4", "gpus = 4.5", 4, "nodes.gpus"),
        ("memory_gib = 40", 'memory_gib = "40"', 7, "nodes.gpu.memory_gib"),
        ('name = "two"', "name = 2", 1, "name"),
        ("write_gbs = 10\n", "write_gbs = 10\ncolour = 1\n", 17, "host.colour"),
        ("read_gbs = 20", "read_gbs 20", 15, "read_gbs 20"),
    ],
)
def test_mistakes_are_named_with_file_line_and_key(tmp_path, old, new, line, key):
    with pytest.raises(ModelError) as caught:
        _load(tmp_path, GOOD.replace(old, new, 1))
    assert (caught.value.line, caught.value.key) == (line, key)
    assert f"c.toml:{line}: {key}" in str(caught.value)


def test_unknown_presets_suggest_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'gpt3-175b'"):
        model.load("gpt3-175")
    with pytest.raises(UsageError, match="did you mean 'dgx-a100'"):
        cluster.load("dgx-a10")
    with pytest.raises(UsageError, match="cannot be read"):
        cluster.load("no/such.toml")


def test_gpu_counts_are_whole_nodes(tmp_path):
    found = _load(tmp_path, GOOD)
    assert found.resized(2).gpus == 2 and found.resized(12).gpus == 12
    with pytest.raises(UsageError, match="use 4 or 8"):
        found.resized(7)
    with pytest.raises(UsageError, match="at least one"):
        found.resized(0)


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("gpt3-175b", 174.6, 0.005),
        ("turing-nlg-17b", 17.2, 0.01),
        ("turing-530b", 530, 0.01),
        ("megatron-1t", 1008, 0.01),
        ("bert-large", 0.335, 0.01),
        ("llama2-7b", 6.74, 0.005),
        ("llama3-70b", 70.6, 0.005),
        ("mixtral-8x7b", 46.7, 0.005),
        ("resnet50", 0.02556, 0.002),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions, tolerance):
    assert model.load(name).total_parameters / 1e9 == pytest.approx(billions, rel=tolerance)


def test_flops_by_hand_count():
    made = model.Transformer("t", 2, 64, 4, 32, 128).build()
    layer = 2 * 32 * (12 * 64 * 64) + 2 * 2 * 32 * 32 * 64
    assert made.forward_flops == 2 * layer + 2 * 32 * 64 * 128
    assert model.load("resnet50").forward_flops == pytest.approx(2 * 4.09e9, rel=0.06)  # 4.09 G multiply-adds


def test_activation_bytes_follow_the_published_formula():
    # s b h (34 + 5 a s / h) bytes per layer: arXiv 2205.05198, equation 1.
    s, h, a = 2048, 6144, 64
    block = model.load("megatron-22b").blocks[0]
    assert block.saved_tensor + block.saved_replicated + block.saved_inner == s * h * 34 + 5 * a * s * s


def test_flash_keeps_no_scores():
    ours, fused = (model.load("gpt3-125m", flash=flash).blocks[0] for flash in (False, True))
    assert ours.kept(True)[2] == 12 * 2048 * (9 * 2048 + 8) and fused.kept(True)[2] == 4 * 12 * 2048
    with pytest.raises(UsageError, match="no attention"):
        model.load("resnet50", flash=True)


def test_model_files(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text("layers = 2\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 100\ngated = true\n")
    assert model.load(str(path)).layers == 2
    path.write_text("layers = 2\nhidden = 64\nheads = 5\nsequence = 32\nvocabulary = 100\n")
    with pytest.raises(ModelError, match=r"m.toml:3: heads: must divide"):
        model.load(str(path))
    with pytest.raises(ModelError, match="3 of 2 experts"):
        model.Transformer("t", 1, 8, 2, 8, 8, experts=2, chosen=3).build()


def test_find_line_of_a_dotted_table():
    assert toml_file.find_line("a = 1\n[x.y]\nb = 2\n", "x.y", "b") == 3


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds"),
    [
        ("resnet18", 11.69e6, 1.814e9),
        ("resnet50", 25.56e6, 4.089e9),
        ("mobilenetv2", 3.505e6, 0.2805e9),  # of 0.3008e9, the depthwise ones left out: memory bounds them
        ("dlrm-kaggle", 540.7e6, 0.486e6),
        ("deepspeech2", 65.0e6, None),
    ],
)
def test_networks_besides_transformers_have_their_published_sizes(name, parameters, multiply_adds):
    made = model.load(name)
    assert made.total_parameters == pytest.approx(parameters, rel=0.01)
    if multiply_adds:
        assert made.forward_flops == pytest.approx(2 * multiply_adds, rel=0.01)


def test_dlrm_by_hand():
    made = model.load("dlrm-kaggle")
    assert len(made.tables) == 26 and sum(made.tables) == 33_762_577 * 16
    bottom = 13 * 512 + 512 * 256 + 256 * 64 + 64 * 16
    top = (16 + 27 * 26 // 2) * 512 + 512 * 256 + 256
    assert made.forward_flops == 2 * (bottom + top + 27 * 27 * 16)
    assert made.lookup_pooled == made.lookup_rows == 2 * 26 * 16


def test_recurrent_layers_by_hand():
    made = model.load("deepspeech2")
    steps, high = (400 + 10 - 11) // 2 + 1 + 10 - 11 + 1, ((161 + 40 - 41) // 2 + 1 + 20 - 21) // 2 + 1
    first, rest = made.blocks[1:]
    assert (steps, high, rest.count) == (200, 41, 4)
    assert first.forward_flops == 2 * 2 * steps * 3 * 1024 * (32 * high + 1024)
    assert rest.total_parameters == 2 * 3 * 1024 * (1024 + 1024 + 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "convnets"', "kind: 'convnets' is unknown: did you mean 'convnet'?"),
        (
            'kind = "dlrm"\nname = "x"\nwidth = 8\ntables = [1]\nbottom = [3, 4]\ntop = [1]',
            "bottom: must end with width",
        ),
        (
            'kind = "dlrm"\nname = "x"\nwidth = 8\ntables = "many"',
            "tables: must be a list of one or more",
        ),
    ],
)
def test_mistakes_in_files_of_other_networks(tmp_path, text, said):
    path = tmp_path / "net.toml"
    path.write_text(text + "\n")
    with pytest.raises(ModelError, match=re.escape(said)):
        model.load(str(path))
