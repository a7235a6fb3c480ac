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

needs_worker = pytest.mark.beside("xray_worker.py")


@pytest.fixture
def answers(worker_rows):
    """Return {question: the compiled kernels of each launch, or the reason why there are none} from the worker."""
    kernels = [[[Compiled(**kernel) for kernel in call] for call in row["calls"]] for row in worker_rows]
    return {row["question"]: row.get("refused") or calls for row, calls in zip(worker_rows, kernels, strict=True)}


@pytest.fixture
def portable_launches(answers):
    return [kernel for (kernel,) in answers["launches"]]


@pytest.fixture
def default_launch(portable_launches):
    return portable_launches[0]


@needs_worker
def test_xray_numbers_equal_counts_in_the_machine_code(default_launch):
    sass, ttgir = default_launch.stages["sass"], default_launch.stages["ttgir"]
    assert default_launch.numbers["tensor"] == len(re.findall(r"\bHGMMA\b", sass)) > 0
    assert default_launch.numbers["exponential"] == sass.count("MUFU.EX2") > 0
    assert default_launch.numbers["warps"] == int(re.search(r'"ttg.num-warps" = (\d+)', ttgir)[1])
    assert default_launch.numbers["spills"] == 0 and 64 <= default_launch.numbers["registers"] <= 255
    assert default_launch.layouts and all(layout.startswith("#ttg.") for layout in default_launch.layouts.values())


@needs_worker
def test_xray_launch_options_apply_to_one_launch_only(portable_launches):
    plain, wide, narrow = (kernel.numbers for kernel in portable_launches)
    assert [n["warps"] for n in (plain, wide, narrow)] == [4, 8, 4]
    assert wide["shared"] < plain["shared"] == narrow["shared"]
    assert narrow["registers"] <= 96 < plain["registers"] and narrow["spills"] > plain["spills"]
    assert narrow["spills"] == len(re.findall(r"\b(?:LDL|STL)\b", portable_launches[2].stages["sass"]))


@needs_worker
def test_xray_maps_a_line_to_its_instructions(default_launch):
    source, first = inspect.getsourcelines(forward.visit_tiles.fn)
    (product,) = (first + n for n, line in enumerate(source) if "FA2.A1.L8" in line)
    (second,) = (first + n for n, line in enumerate(source) if "FA2.A1.L10" in line)
    loops, d, B_r, B_c = 2, 64, 64, 64
    for line, n in ((product, d // 16), (second, B_c // 16)):  # an instruction multiplies 16 columns by 16 rows
        instructions = default_launch.lines[f"forward.py:{line}"]
        assert sum(i.startswith("HGMMA") for i in instructions) == loops * n * B_r // 64, line
    assert not any("MUFU.EX2" in i for i in default_launch.lines[f"forward.py:{product}"])
    steps, first = inspect.getsourcelines(softmax.softmax_step.fn)
    (exponent,) = (first + n for n, line in enumerate(steps) if "p_ij = tl.exp2" in line)
    assert any("MUFU.EX2" in i for i in default_launch.lines[f"softmax.py:{exponent}"])


@needs_worker
def test_xray_keeps_fma_fusion_whatever_the_default(answers):
    for name, usual in (("portable.forward", answers["launches"]), ("mine.py", answers["mine.py"])):
        (kernel,), (unfused,) = usual[0], answers[f"{name}, unfused by default"][0]
        assert kernel.stages["sass"] == unfused.stages["sass"] and "FFMA" in kernel.stages["sass"]


@needs_worker
def test_xray_compiles_for_an_amd_gpu(answers):
    ((kernel,),) = answers["gfx942"]
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
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        xray(name, **options)
    assert "\n" not in str(refused.value)


def test_xray_accepts_names_of_graphics_cards():
    cards = {"sm_80": ("a100",), "sm_86": ("A10", "RTX 3090"), "sm_89": ("L4", "L40S", "rtx-4090")}
    cards |= {"gfx942": ("MI300X",), "sm_90": ("sm_90", "H100", "h200"), "sm_100": ("B200",), "sm_120": ("RTX 5090",)}
    assert all(chip_of(name) == chip for chip, names in cards.items() for name in names)


@needs_worker
def test_xray_reports_compile_errors_in_one_sentence(answers):
    says = answers["no power of two"]
    assert says.startswith("xray: r07_skipping cannot be compiled for sm_90 here: ") and "\n" not in says


@needs_worker
def test_xray_compiles_hopper_kernels_as_they_are_launched(answers):
    (forward,), (before, backward, after) = answers["hopper.forward"][0], answers["hopper.backward"][0]
    names = [kernel.name for kernel in (before, backward, after)]
    assert names == ["bwd_preprocess", "backward_kernel", "bwd_postprocess"]
    for kernel, warps in ((forward, 16), (backward, 12)):  # three consumers, or two, with a producer's four
        assert kernel.numbers["warps"] == warps and kernel.numbers["tensor"] > 0 == kernel.numbers["spills"]
    assert "cannot be compiled for sm_90 here: ValueError: it does not take d = 136 in " in answers["not hopper's d"]


@needs_worker
def test_xray_reports_a_kernel_that_does_not_fit(default_launch, monkeypatch, capsys):
    wide = default_launch._replace(name="wide_kernel", numbers=default_launch.numbers | dict(shared=232449))
    monkeypatch.setattr(xray_command, "xray_launches", lambda *_, **sizes: [[default_launch, wide]])
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


@needs_worker
def test_xray_prints_the_requested_stages(portable_launches, monkeypatch, capsys):
    asked, wide = [], portable_launches[1]
    monkeypatch.setattr(xray_command, "xray_launches", lambda *x, **sizes: asked.append((x, sizes)) or [[wide]])
    words = "portable.forward --d 64 --full --dtype float16 --ptx --num_warps 8"
    assert xray_command.main(words.split()) == 0
    sizes = dict(d=64, N=4096, causal=False, dtype="float16")
    assert asked == [(("portable.forward", [dict(num_warps=8)], "sm_90"), sizes)]
    printed = capsys.readouterr().out
    assert re.search(r"^forward_kernel .* 8$", printed, re.MULTILINE)
    assert "forward_kernel, ptx\n" in printed and ".target sm_90a" in printed and "forward_kernel, sass" not in printed


@needs_worker
def test_where_prints_the_machine_code_of_a_paper_line(answers, monkeypatch, capsys):
    assert command.main(["where", "FA2.A1.L8", "--sass", "--chip", "sm_75"]) == 2
    assert command.main(["where", "FA1.A4.L17", "--sass"]) == 2
    assert "has no Triton line" in capsys.readouterr().err
    monkeypatch.setattr(lines, "xray", lambda name, chip: answers[f"{name}, {chip}"][0])
    assert command.main(["where", "FA2.A1.L8", "--sass", "--chip", "sm_90"]) == 0
    out = capsys.readouterr().out
    shown = re.search(r"s_ij = .*\n  \w+, sm_90, (\d+) instructions: .*HGMMA\.", out)
    assert f"    … {int(shown[1]) - lines.MAX_INSTRUCTIONS} more" in out


@needs_worker
def test_xray_compiles_a_users_file_and_counts_loops(answers):
    ((kernel,),) = answers["mine.py"]
    (loop,) = loops(kernel.stages["sass"])
    assert loop.multiplications == 2 * 64 * 64 * 64 / 4  # a warp's quarter of two products of 64 × 64 × 64
    assert 9 < loop.per_score(64) < 13 and loop.copies == 0 and loop.instructions < kernel.numbers["instructions"]
