"""What scripts/machine_code.py counts as the same machine code."""

import pytest

SASS = """
	.section	.text.{kernel},"ax",@progbits
        .global         {kernel}
{kernel}:
.text.{kernel}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `({label}) ;
        /*0020*/                   MOV R4, 32@lo({kernel}_global) ;
{label}:
        /*0030*/                   RET.REL.NODEC R2 `({kernel}) ;
        /*0040*/                   {last} ;
"""


def code(kernel="merge", label=".L_x_1", last="EXIT"):
    from machine_code import instructions

    return instructions(SASS.format(kernel=kernel, label=label, last=last))


def test_names_addresses_and_labels_do_not_count():
    assert code(kernel="combine", label=".L_x_77") == code()
    assert code().splitlines()[:2] == ["LDC R1, c[0x0][0x28] ;", "@!P0 BRA `(.L0) ;"]


@pytest.mark.parametrize("last", ["RET", "EXIT R1", "LDC R1, c[0x0][0x30]"])
def test_instructions_registers_and_constant_banks_count(last):
    assert code(last=last) != code()


def test_every_difference_has_a_line():
    from machine_code import differences

    before = {"topk: a": ["0", "1"], "topk: b": ["2"], "topk: c": ["3"], "topk: d": ["4"]}
    after = {"topk: a": ["0", "5"], "topk: b": ["2"], "topk: c": ["3", "3"], "topk: e": ["4"]}
    assert differences(before, before) == []
    assert differences(before, after) == [
        "differs: topk: a: launch 1", "differs: topk: c: 1 launches before, 2 now", "gone: topk: d", "new: topk: e",
    ]  # fmt: skip
