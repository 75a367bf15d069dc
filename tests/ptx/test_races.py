"""Races in shared memory that the PTX machine has to find, planted in kernels beside right ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import machine as ptx_machine

HEAD = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k0(
.param .u64 a
)
{
  .shared .align 16 .b8 s[1024];
ld.param.u64 %rd1, [a];
mov.u32 %r1, %tid.x;
mov.u32 %r9, %ctaid.x;
mov.u32 %r2, s;
add.s32 %r3, %r2, 8;
and.b32 %r4, %r1, 31;
shl.b32 %r5, %r4, 2;
add.s32 %r6, %r2, %r5;
shr.u32 %r7, %r1, 5;
setp.eq.u32 %p1, %r7, 0;
setp.eq.u32 %p2, %r7, 2;
setp.eq.u32 %p3, %r1, 0;
setp.eq.u32 %p5, %r4, 0;
"""
"""Warps of 32 threads: a barrier at s and one at s + 8; words of a warp's lanes from %r6 + 512 on."""
MAKE = "@%p3 mbarrier.init.shared.b64 [%r2], 32;\n@%p3 mbarrier.init.shared.b64 [%r3], {empty};\nbar.sync 0;\n"
FILL = "@%p1 st.shared.b32 [%r6+512], %r1;\n@%p1 mbarrier.arrive.shared.b64 _, [%r2];\n"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\n"
END = "$LEND:\nret;\n}\n"


def run(body, warps=3, blocks=1, cluster=1):
    memory = ptx_machine.Memory([np.zeros(4096, np.float32)], [True])
    module = ptx_machine.parse(HEAD + body + END)
    machine = ptx_machine.Machine(module, "k0", memory, memory.places, blocks, 32 * warps, cluster=cluster)
    machine.run()
    return machine


def filled(empty=2, skip="", release="@%p5 mbarrier.arrive.shared.b64 _, [%r3];\n", again=""):
    """Warp 0 fills, 1 and 2 wait and read; ``again``: warp 0 then waits for them and fills again."""
    return (
        MAKE.format(empty=empty) + FILL + f"@%p1 bra $LAGAIN;\n{skip}" + WAIT + "$LREAD:\n"
        "ld.shared.b32 %r8, [%r6+512];\n" + release + "bra $LEND;\n$LAGAIN:\n" + again
    )


AGAIN = "mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;\nst.shared.b32 [%r6+512], %r4;\n"


def test_right_kernels_pass():
    machine = run(filled(again=AGAIN))
    assert list(machine.registers["%r8"][32:]) == [*range(32), *range(32)]
    run(filled(again=AGAIN), blocks=3)
    run("st.shared.b32 [%r6+512], %r4;\n", warps=1)


@pytest.mark.parametrize(
    "body",
    [
        filled(skip="@%p2 bra $LREAD;\n"),
        filled(empty=1, release="@%p2 bra $LEND;\n@%p5 mbarrier.arrive.shared.b64 _, [%r3];\n", again=AGAIN),
        filled(again="st.shared.b32 [%r6+512], %r4;\n"),
        filled(again="mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\nst.shared.b32 [%r6+512], %r4;\n"),
    ],
    ids=["a second group does not wait", "one of two readers never tells", "nobody is waited for", "the wrong barrier"],
)
def test_a_barrier_orders_only_who_waits_there(body):
    with pytest.raises(ptx_machine.Fault, match="race in shared memory"):
        run(body)


def test_a_reader_that_others_follow_is_remembered():
    """All read one word; the thread that read it last writes it."""
    with pytest.raises(ptx_machine.Fault, match="race"):
        run("ld.shared.b32 %r8, [%r2+512];\nsetp.eq.u32 %p4, %r1, 95;\n@%p4 st.shared.b32 [%r2+512], %r1;\n")
    run("ld.shared.b32 %r8, [%r2+512];\nbar.sync 0;\nsetp.eq.u32 %p4, %r1, 95;\n@%p4 st.shared.b32 [%r2+512], %r1;\n")


def test_a_barrier_of_one_block_is_none_of_another():
    """Only the first block waits between what it writes and what another warp of it reads."""
    body = "@%p1 st.shared.b32 [%r6+512], %r1;\nsetp.ne.u32 %p4, %r9, 0;\n@%p4 bra $LREAD;\nbar.sync 0;\n$LREAD:\n"
    body += "ld.shared.b32 %r8, [%r6+512];\n"
    run(body)
    with pytest.raises(ptx_machine.Fault, match="race"):
        run(body, blocks=2)


def test_bytes_of_a_word_are_apart_where_kernels_store_bytes():
    """Neighbours that store bytes of one word do not meet; whoever reads the word without a barrier does."""
    store = "add.s32 %r8, %r2, %r1;\nst.shared.u8 [%r8+512], %r1;\n"
    run(store, warps=2)
    with pytest.raises(ptx_machine.Fault, match="race"):
        run(store + "ld.shared.b32 %r8, [%r6+512];\n", warps=2)


def test_a_block_does_not_end_before_others_have_read_its_memory():
    """Both blocks of a cluster read the first one's word: it may end once all have passed a barrier of the cluster."""
    together = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    body = "@%p3 st.shared.b32 [%r2+512], %r9;\n" + together
    body += "mapa.shared::cluster.u32 %r8, %r2, 0;\nld.shared::cluster.b32 %r8, [%r8+512];\n"
    assert not run(body + together, warps=1, blocks=4, cluster=2).registers["%r8"][:64].any()
    with pytest.raises(ptx_machine.Fault, match="ends while other blocks"):
        run(body, warps=1, blocks=4, cluster=2)


def test_a_barrier_of_a_warp_orders_its_lanes_only():
    """Lanes read what their neighbours have written."""
    turned = "xor.b32 %r8, %r5, 4;\nadd.s32 %r8, %r2, %r8;\n"
    read = "ld.shared.b32 %r8, [%r8+512];\n"
    write, wait = "st.shared.b32 [%r6+512], %r1;\n", "bar.warp.sync 0xffffffff;\n"
    machine = run(turned + write + wait + read, warps=1)
    assert list(machine.registers["%r8"]) == [lane ^ 1 for lane in range(32)]
    run(turned + write + wait + read + wait + write, warps=1)
    for body, warps in ((write + read, 1), (write + wait + read + write, 1), ("@%p1 " + write + wait + read, 2)):
        with pytest.raises(ptx_machine.Fault, match="race"):
            run(turned + body, warps=warps)
