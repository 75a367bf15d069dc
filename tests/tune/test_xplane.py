"""The reader of profiles against `jax.profiler.ProfileData`, on damaged files, and by the wire format."""

import random

import jax
import jax.numpy as jnp
import pytest

from jcuts.tune.baseline import xla_profile, xplane

# What `ProfileData` does in Python 3.12, which ends the process where it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    call = jax.jit(lambda x: jnp.sin(x @ x).sum())
    x = jnp.ones((64, 64))
    jax.block_until_ready(call(x))
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            jax.block_until_ready(call(x))
    return next(folder.rglob("*.xplane.pb"))


def _everything(_):
    return True


def test_events_are_those_that_jax_reads(recorded):
    wanted = []
    data = jax.profiler.ProfileData.from_file(str(recorded))
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                texts = {key: value for key, value in event.stats if isinstance(value, str)}
                wanted.append((event.name, event.duration_ns, texts))
    found = list(xplane.events(recorded, _everything, _everything))
    assert [event.name for event in found] == [name for name, _, _ in wanted] and any(stats for _, _, stats in wanted)
    assert [e.picoseconds / 1000 for e in found] == pytest.approx([duration for _, duration, _ in wanted])
    assert [dict(e.stats) for e in found] == [stats for _, _, stats in wanted]


def test_planes_and_lines_are_chosen_by_name(recorded):
    data = jax.profiler.ProfileData.from_file(str(recorded))
    planes = [(plane.name, line.name, len(list(line.events))) for plane in data.planes for line in plane.lines]
    name, line, count = max(planes, key=lambda found: found[2])
    same = sum(n for p, q, n in planes if p == name and q == line)
    assert count and len(list(xplane.events(recorded, lambda p: p == name, lambda q: q == line))) == same
    assert not list(xplane.events(recorded, lambda p: p == "no such plane", _everything))
    assert xla_profile.is_gpu("/device:GPU:0") and not xla_profile.is_gpu("/host:CPU")


def test_a_damaged_profile_is_an_error_and_no_crash(recorded, tmp_path):
    whole, broken, rng = recorded.read_bytes(), tmp_path / "broken.xplane.pb", random.Random(1)
    refused = 0
    for _ in range(40):
        data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.5 else whole)
        for _ in range(8):
            data[rng.randrange(len(data))] = rng.randrange(256)
        broken.write_bytes(bytes(data))
        try:
            list(xplane.events(broken, _everything, _everything))
        except ValueError:
            refused += 1
    assert refused  # the others decode to something else
    broken.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="cut short"):
        list(xplane.events(broken, _everything, _everything))
    with pytest.raises(RuntimeError, match="cannot be read"):
        xla_profile._recorded(tmp_path, "jit_f")


def test_time_of_an_hlo_instruction_is_the_sum_of_its_kernels(tmp_path):
    text = """planes { name: "/device:GPU:0"
      lines { name: "Stream #13(Compute)"
        events { metadata_id: 1 duration_ps: 5000 stats { metadata_id: 7 ref_value: 9 } stats { metadata_id: 8 str_value: "jit_f" } }
        events { metadata_id: 1 duration_ps: 2000 stats { metadata_id: 7 ref_value: 9 } }
        events { metadata_id: 1 duration_ps: 4000 stats { metadata_id: 7 ref_value: 9 } stats { metadata_id: 8 str_value: "jit_g" } }
        events { metadata_id: 1 duration_ps: 8000 stats { metadata_id: 8 str_value: "jit_f" } }
      }
      lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000 stats { metadata_id: 7 ref_value: 9 } } }
      event_metadata { key: 1 value { id: 1 name: "kernel" } }
      stat_metadata { key: 7 value { id: 7 name: "hlo_op" } }
      stat_metadata { key: 8 value { id: 8 name: "hlo_module" } }
      stat_metadata { key: 9 value { id: 9 name: "fusion.1" } }
    }"""  # noqa: E501
    made = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (tmp_path / "host.xplane.pb").write_bytes(made)
    assert xla_profile._recorded(tmp_path, "jit_f") == pytest.approx({"fusion.1": 7e-9})
