"""Faults of windows, softcap and sinks: one bound too far, a key read that nobody sees, a derivative left out."""

ATTENTION, CHECKS, OPERATORS, CHOICE, LAUNCH = (
    f"fa2_lab/{name}.py"
    for name in ("api/attention", "api/checks", "api/operators", "kernels/choice", "kernels/launch")
)
TILE, SOFTMAX, FORWARD, BACKWARD = (
    f"fa2_lab/kernels/portable/{name}.py" for name in ("tile", "softmax", "forward", "backward")
)
DECODE, PLAN = (f"fa2_lab/kernels/decode/{name}.py" for name in ("kernel", "plan"))
TESTS = "tests/heart/test_masks.py::"
MEET, DECODES, PAGES = (
    TESTS + name
    for name in ("test_every_two_options_meet", "test_decode", "test_pages_before_every_window_are_not_read")
)
UNREAD, EMPTY = (
    TESTS + f"test_{name}" for name in ("keys_outside_of_every_window_are_not_read", "rows_that_see_nothing")
)
SMALL = TESTS + "test_tiles_between_the_edges_are_not_masked"
BAD = "tests/heart/test_attention_call.py::test_bad_input_is_named_before_any_launch"
KIND = "tests/heart/test_attention_call.py::test_a_kind_of_call_is_all_that_matters"

FAULTS = [
    (TILE, "tl.maximum(row + N_k - N_q - left, 0)", "tl.maximum(row + N_k - N_q - left + 1, 0)", MEET),
    (TILE, "keys_seen(row if right is None else row + right,", "keys_seen(row,", MEET),
    (TILE, "col + N_q - N_k + left + 1", "col + N_q - N_k + left", MEET),
    (TILE, "hole = tl.cdiv(hole, tile.B_c) * tile.B_c", "hole = hole // tile.B_c * tile.B_c", SMALL),
    (FORWARD, "since = None if window[0] is None else keys[0]", "since = None", UNREAD),
    (BACKWARD, "since = None if window[0] is None else keys[0]", "since = None", UNREAD),
    (FORWARD, "        l_i += 1.0\n", "", MEET),
    (FORWARD, "(LOG2E / scales.fine)", "LOG2E", MEET),
    (BACKWARD, "ds_ij * (1 - s_ij * s_ij)", "ds_ij * (1 - s_ij)", MEET),
    (BACKWARD, "L.nan_to_num())", "L)", TESTS + "test_a_sink_of_minus_infinity_is_none"),
    (BACKWARD, "return -(p * D)", "return (p * D)", EMPTY),
    (SOFTMAX, "tl.where(size < 0.25, series,", "tl.where(size < 0.0, series,", TESTS + "test_a_softcap_of_any_size"),
    (DECODE, "splits * tile.B_c, w == 0,", "splits * tile.B_c, w >= 0,", DECODES),
    (DECODE, "work.N_k if tile.page == 0 else length, work.N_q", "work.N_k, work.N_q", PAGES),
    (DECODE, "since = None if window[0] is None else first_key", "since = None", PAGES),
    (DECODE, "since = None if since is None else since - first + row", "since = None", PAGES),
    (PLAN, "(Q, K, V, key_lengths, table, sinks)", "(Q, K, V, key_lengths, table)",
     "tests/heart/test_decode.py::test_what_is_prepared_serves_no_other_kind_of_call"),
    (CHOICE, "and options.softcap is sinks is None", "and options.softcap is None",
     "tests/heart/test_hopper.py::test_choice"),
    (CHECKS, "left >= N_k - 1:", "left >= N_k - 2:", TESTS + "test_a_window_as_wide_as_the_keys_is_none"),
    (CHECKS, "options.scale < SMALLEST_SCALE:", "options.scale < 0:", TESTS + "test_a_sink_is_not_scaled"),
    (CHECKS, "if not 1e-30 <= softcap <= 1e30:", "if not softcap <= 1e30:", BAD),
    (CHECKS, "if size is not None and size < 0:", "if size is not None and size < -1:", BAD),
    (ATTENTION, "(*window, *map(type, window))", "(*window,)", KIND),
    (OPERATORS, "(sinks is not None and sinks.requires_grad)", "False", TESTS + "test_sinks_alone_may_want_a_gradient"),
    (CHECKS, "begin + size > key_lengths[:, None] - N_q - left", "begin + size > 0", PAGES),
]  # fmt: skip
