"""Faults of packed.py and of what the portable kernels do for it, and of transformers.py."""

CHECKS, OPERATORS, PACKED, TILE, FORWARD, BACKWARD, LAUNCH = (
    f"fa2_lab/{name}.py"
    for name in (
        "api/checks",
        "api/operators",
        "api/packed",
        "kernels/portable/tile",
        "kernels/portable/forward",
        "kernels/portable/backward",
        "kernels/launch",
    )
)
TESTS = "tests/heart/test_packed.py::test_"
LENGTHS, MASKS = TESTS + "lengths_of_every_kind", TESTS + "windows_softcap_and_sinks"
BEHIND, STARTS = TESTS + "rows_behind_the_last_start_see_nothing", TESTS + "starts_are_looked_at"

FAULTS = [
    (
        TILE,
        "tl.where(b == 0, 0, tl.minimum(",
        "tl.where(b < 0, 0, tl.minimum(",
        TESTS + "a_start_outside_counts_as_the_nearest_inside",
    ),
    (TILE, "while behind - b > 1:", "while behind - b > 2:", TESTS + "tiny_sequences"),
    (TILE, "tl.where((b < sequences) & (i * B < rows)", "tl.where((i * B < rows)", BEHIND),
    (FORWARD, "L_h += q_at", "L_h += 0", LENGTHS),
    (BACKWARD, "j, k_at, N_k, q_at, N_q = packed", "j, k_at, N_k, q_at, _ = packed", LENGTHS),
    (LAUNCH, "(X.stride(0), X.stride(1), X.stride(0))", "(0, X.stride(1), X.stride(0))", LENGTHS),
    (LAUNCH, "else N // B + sequences + 1)", "else N // B + 1)", LENGTHS),
    (CHECKS, "if starts[-1] != total:", "if starts[-1] > total:", STARTS),
    (CHECKS, "if starts[0] != 0:", "if starts[0] < 0:", STARTS),
    (PACKED, "if a < b and c < d:", "if a < b:", TESTS + "the_reference_behind_the_same_call"),
    (PACKED, "window=options.window, softcap", "window=(options.left, None), softcap", MASKS),
    (
        OPERATORS,
        "found if sinks is None else [*found, sinks",
        "found if sinks is None else [*found[:2], sinks",
        TESTS + "opcheck",
    ),
]
