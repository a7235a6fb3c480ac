"""What xray reports is what the compiler made, and a line's instructions are those of that line."""

import inspect
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab.kernels.common import softmax
from fa2_lab.kernels.portable import forward
from fa2_lab.tools import command
from fa2_lab.tools.xray import Compiled, lines, loops, names, xray, xray_launches
from fa2_lab.tools.xray import command as xray_command
from fa2_lab.tools.xray.compile import chip_of, full_name

compiled = pytest.mark.beside("xray_worker.py")


@pytest.fixture
def found(rows):
    """Return {question: the compiled kernels of each launch, or the reason why there are none} from the worker."""
    kernels = [[[Compiled(**kernel) for kernel in call] for call in row["calls"]] for row in rows]
    return {row["asked"]: row.get("refused") or calls for row, calls in zip(rows, kernels, strict=True)}


@pytest.fixture
def launches(found):
    return [kernel for (kernel,) in found["launches"]]


@pytest.fixture
def hopper(launches):
    return launches[0]


@compiled
def test_xray_numbers_equal_counts_in_the_machine_code(hopper):
    sass, ttgir = hopper.stages["sass"], hopper.stages["ttgir"]
    assert hopper.numbers["tensor"] == len(re.findall(r"\bHGMMA\b", sass)) > 0
    assert hopper.numbers["exponential"] == sass.count("MUFU.EX2") > 0
    assert hopper.numbers["warps"] == int(re.search(r'"ttg.num-warps" = (\d+)', ttgir)[1])
    assert hopper.numbers["spills"] == 0 and 64 <= hopper.numbers["registers"] <= 255
    assert hopper.layouts and all(layout.startswith("#ttg.") for layout in hopper.layouts.values())


@compiled
def test_xray_launch_options_apply_to_one_launch_only(launches):
    plain, wide, narrow = (kernel.numbers for kernel in launches)
    assert [n["warps"] for n in (plain, wide, narrow)] == [4, 8, 4]
    assert wide["shared"] < plain["shared"] == narrow["shared"]
    assert narrow["registers"] <= 96 < plain["registers"] and narrow["spills"] > plain["spills"]
    assert narrow["spills"] == len(re.findall(r"\b(?:LDL|STL)\b", launches[2].stages["sass"]))


@compiled
def test_xray_maps_a_line_to_its_instructions(hopper):
    source, first = inspect.getsourcelines(forward.visit_tiles.fn)
    (product,) = (first + n for n, line in enumerate(source) if "FA2.A1.L8" in line)
    (second,) = (first + n for n, line in enumerate(source) if "FA2.A1.L10" in line)
    loops, d, B_r, B_c = 2, 64, 64, 64
    for line, n in ((product, d // 16), (second, B_c // 16)):  # an instruction multiplies 16 columns by 16 rows
        became = hopper.lines[f"forward.py:{line}"]
        assert sum(i.startswith("HGMMA") for i in became) == loops * n * B_r // 64, line
    assert not any("MUFU.EX2" in i for i in hopper.lines[f"forward.py:{product}"])
    steps, first = inspect.getsourcelines(softmax.softmax_step.fn)
    (exponent,) = (first + n for n, line in enumerate(steps) if "p_ij = tl.exp2" in line)
    assert any("MUFU.EX2" in i for i in hopper.lines[f"softmax.py:{exponent}"])


@compiled
def test_xray_keeps_fma_fusion_whatever_the_default(found):
    for name, usual in (("portable.forward", found["launches"]), ("mine.py", found["mine.py"])):
        (kernel,), (unfused,) = usual[0], found[f"{name}, unfused by default"][0]
        assert kernel.stages["sass"] == unfused.stages["sass"] and "FFMA" in kernel.stages["sass"]


@compiled
def test_xray_compiles_for_an_amd_gpu(found):
    ((kernel,),) = found["gfx942"]
    assert kernel.numbers["tensor"] == len(re.findall("v_mfma", kernel.stages["sass"])) > 0
    assert kernel.numbers["registers"] == int(re.search(r"\.vgpr_count: *(\d+)", kernel.stages["sass"])[1])


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("portable.forward", dict(chip=""), "chip: got ''; it takes one of sm_80 (A100), "),
        ("nobody.py", dict(), "there is no file nobody.py here"),
        ("mine.py", dict(d=300), "d: got 300; it takes numbers from 1 to 256"),
        ("portable.backward", dict(N=64.0), "N: got 64.0; it takes numbers from 1 on"),
    ],
)
def test_xray_rejects_bad_input_in_one_sentence(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)) as told:
        xray(name, **options)
    assert "\n" not in str(told.value)


def test_xray_accepts_names_of_graphics_cards():
    cards = {"sm_80": ("a100",), "sm_86": ("A10", "RTX 3090"), "sm_89": ("L4", "L40S", "rtx-4090")}
    cards |= {"gfx942": ("MI300X",), "sm_90": ("sm_90", "H100", "h200"), "sm_100": ("B200",), "sm_120": ("RTX 5090",)}
    assert all(chip_of(name) == chip for chip, names in cards.items() for name in names)


@compiled
def test_xray_reports_compile_errors_in_one_sentence(found):
    says = found["no power of two"]
    assert says.startswith("xray: r07_skipping cannot be compiled for sm_90 here: ") and "\n" not in says


@compiled
def test_xray_compiles_hopper_kernels_as_they_are_launched(found):
    (forward,), (before, backward, after) = found["hopper.forward"][0], found["hopper.backward"][0]
    names = [kernel.name for kernel in (before, backward, after)]
    assert names == ["bwd_preprocess", "backward_kernel", "bwd_postprocess"]
    for kernel, warps in ((forward, 16), (backward, 12)):  # three consumers, or two, with a producer's four
        assert kernel.numbers["warps"] == warps and kernel.numbers["tensor"] > 0 == kernel.numbers["spills"]
    assert "cannot be compiled for sm_90 here: ValueError: it does not take d = 136 in " in found["not hopper's d"]


@compiled
def test_xray_reports_a_kernel_that_does_not_fit(hopper, monkeypatch, capsys):
    wide = hopper._replace(name="wide_kernel", numbers=hopper.numbers | dict(shared=232449))
    monkeypatch.setattr(xray_command, "xray_launches", lambda *_, **sizes: [[hopper, wide]])
    assert xray_command.main(["portable.forward"]) == 0
    says = "wide_kernel does not fit: it takes 232,449 bytes of shared memory, and sm_90 has 232,448"
    assert [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line] == [says]


@pytest.mark.parametrize("option, value", [("num_ctas", 2), ("num_warps", 0), ("num_stages", "3"), ("maxnreg", True)])
def test_xray_rejects_unknown_launch_options(option, value):
    says = f"launches: got {option}={value!r}; it takes numbers from 1 on for num_warps, num_stages, maxnreg"
    with pytest.raises(ValueError, match=re.escape(says)):
        xray_launches("portable.forward", [{option: value}])


def test_xray_without_arguments_lists_kernels(capsys):
    assert xray_command.main([]) == 0 and capsys.readouterr().out.split() == names()
    assert [full_name(rung) for rung in ("09", "r09", "r09_free_loads")] == 3 * ["r09_free_loads"]


@compiled
def test_xray_prints_the_requested_stages(launches, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(xray_command, "xray_launches", lambda *x, **sizes: asked.append((x, sizes)) or [[launches[1]]])
    assert (
        xray_command.main(
            ["portable.forward", "--d", "64", "--full", "--dtype", "float16", "--ptx", "--num_warps", "8"]
        )
        == 0
    )
    sizes = dict(d=64, N=4096, causal=False, dtype="float16")
    assert asked == [(("portable.forward", [dict(num_warps=8)], "sm_90"), sizes)]
    printed = capsys.readouterr().out
    assert re.search(r"^forward_kernel .* 8$", printed, re.MULTILINE)
    assert "forward_kernel, ptx\n" in printed and ".target sm_90a" in printed and "forward_kernel, sass" not in printed


@compiled
def test_where_prints_the_machine_code_of_a_paper_line(found, monkeypatch, capsys):
    assert command.main(["where", "FA2.A1.L8", "--sass", "--chip", "sm_75"]) == 2
    assert command.main(["where", "FA1.A4.L17", "--sass"]) == 2
    assert "has no Triton line" in capsys.readouterr().err
    monkeypatch.setattr(lines, "xray", lambda name, chip: found[f"{name}, {chip}"][0])
    assert command.main(["where", "FA2.A1.L8", "--sass", "--chip", "sm_90"]) == 0
    out = capsys.readouterr().out
    became = re.search(r"s_ij = .*\n  \w+, sm_90, (\d+) instructions: .*HGMMA\.", out)
    assert f"    … {int(became[1]) - lines.MAX_INSTRUCTIONS} more" in out


@compiled
def test_xray_compiles_a_users_file_and_counts_loops(found):
    ((kernel,),) = found["mine.py"]
    (loop,) = loops(kernel.stages["sass"])
    assert loop.multiplications == 2 * 64 * 64 * 64 / 4  # a warp's quarter of two products of 64 × 64 × 64
    assert 9 < loop.per_score(64) < 13 and loop.copies == 0 and loop.instructions < kernel.numbers["instructions"]
