"""Faults of kernels/: what a launch is made of, whose preparation a call gets, where rows and heads lie."""

LAUNCH, CHOICE, PREPARED, RELAUNCH = (
    f"fa2_lab/kernels/{name}.py" for name in ("launch", "choice", "prepared", "relaunch")
)
TILE, SOFTMAX, BACKWARD, MERGE = (
    f"fa2_lab/kernels/portable/{name}.py" for name in ("tile", "softmax", "backward", "merge")
)
SIZES = "fa2_lab/kernels/hopper/backward/sizes.py"
FORWARD_SIZES = "fa2_lab/kernels/hopper/forward/sizes.py"
HOST = "fa2_lab/kernels/hopper/shared/host.py"
NAME = "tests/heart/test_kernels.py::test_a_find_is_for_one_chip_kernel_d_dtype_and_mask"
SCALES = "tests/heart/test_attention.py::test_scales"
KIND = "tests/heart/test_kernels.py::test_what_a_call_s_kind_is_made_of"
CALLS = "tests/heart/test_kernels.py::test_every_kind_of_call_is_prepared_for_itself"
PLACES = "tests/heart/test_kernels.py::test_programs_take_the_blocks_of_some_heads_in_turn"
FAR = "tests/heart/test_kernels.py::test_a_head_may_lie_behind_two_to_the_31_elements"
GAPS = "tests/heart/test_attention.py::test_only_one_tensor_in_another_layout"
REPEATED = "tests/heart/test_attention_call.py::test_gradients_of_O_and_L_that_repeat_themselves"
HOPPER = "tests/heart/test_kernels.py::test_hopper_s_kernels_are_for_hopper"
SAME = "found[1] != (limits, x._version, x.data_ptr())"
FEWER = "tests/heart/test_attention_call.py::test_lengths_that_were_right_for_many_keys_are_looked_at_again_for_fewer"
CHANGED = "tests/heart/test_attention_call.py::test_lengths_are_looked_at_again_after_a_change"
TABLE = "tests/heart/test_decode_paged.py::test_the_table_is_looked_at_again_after_a_change"
AGAIN = "tests/heart/test_relaunch.py::test_the_driver_is_handed_the_same_as_by_tritons_own_call"
OTHER_KEYS = "tests/heart/test_packed.py::test_queries_and_keys_of_different_numbers"
OF_L = "tests/heart/test_attention.py::test_gradient_of_L"
ALONE = "tests/heart/test_attention.py::test_the_backward_by_itself"
ENOUGH = "tests/heart/test_hopper_backward.py::test_where_there_is_enough_work"
PARTS = "tests/heart/test_hopper_backward.py::test_parts"
AT_ONCE = "tests/heart/test_hopper_backward.py::test_heads_at_once"
IN_TURN = "tests/heart/test_hopper_backward.py::test_in_turn_fewer_heads_of_large_groups_run_at_a_time"
STATE = "tests/heart/test_distributed.py::test_state_is_the_ladder_s"
ROWS = "            rows(Q, K, V, O, dO, L, dL, D, dQ, key_lengths, seed, cu_q, cu_k)\n"
COLUMNS = "            columns(Q, K, V, dO, L, D, dK, dV, key_lengths, seed, cu_q, cu_k)\n"

FAULTS = [
    (BACKWARD, "0.0, D_i - of_rows(dL", "0.0, D_i + of_rows(dL", OF_L),
    (BACKWARD, "D_i = tl.where(L_i == NEG_INF, 0.0, D_i", "D_i = tl.where(L_i > NEG_INF, 0.0, D_i", OF_L),
    (BACKWARD, ROWS + COLUMNS, COLUMNS + ROWS, ALONE),
    (BACKWARD, "* apart + row, D_i, mask", "* N_q + row, D_i, mask", OTHER_KEYS),
    (BACKWARD, "None if dL is None else dL + q_at", "dL", OTHER_KEYS),
    (SIZES, "128: [(256, 1)]", "128: [(512, 1)]", ENOUGH),
    (SIZES, "64: [(512, 2)]", "64: [(512, 1)]", ENOUGH),
    (SIZES, "DRIFT if group > 4 * parts", "DRIFT if group > 8 * parts", PARTS),
    (SIZES, "d_pad * SUMS_PER_COLUMN", "128 * SUMS_PER_COLUMN", PARTS),
    (SIZES, "0.8 * SMs / blocks", "1.6 * SMs / blocks", AT_ONCE),
    (SIZES, "if causal else 1\n\n\ndef at_once_in_turn", "\n\n\ndef at_once_in_turn", AT_ONCE),
    (SIZES, "(4 * N_q * d * group)", "(4 * N_q * d)", IN_TURN),
    (HOST, "-heads % n", "heads % n", "tests/heart/test_hopper.py::test_no_few_heads_are_left_over"),
    (
        FORWARD_SIZES,
        "if causal and (lengths or N_k < 2 * N_q):",
        "if causal:",
        "tests/heart/test_hopper.py::test_causal_rows_of_nearly_the_same_length_run_in_rounds",
    ),
    (
        FORWARD_SIZES,
        "tile * keys / 128",
        "tile * N_q / 128",
        "tests/heart/test_hopper.py::test_where_keys_are_few_it_counts_how_soon_a_block_starts",
    ),
    (FORWARD_SIZES, "-(-N_k // sizes.B_c) * sizes.B_c", "N_k", "tests/heart/test_hopper.py::test_sizes"),
    (
        FORWARD_SIZES,
        "32: [(1, ANY, 2048, 0,",
        "32: [(1, ANY, 1024, 0,",
        "tests/heart/test_hopper.py::test_at_d_32_much_work_is_enough_where_there_is_no_mask",
    ),
    (SIZES, "32: [(2048, math.inf), (math.inf, 6)]", "32: [(2048, math.inf), (math.inf, 60)]", ENOUGH),
    (
        SIZES,
        "32: [(2048, math.inf), (math.inf, 6)]",
        "32: [(2048, 100), (math.inf, 6)]",
        "tests/heart/test_hopper_backward.py::test_at_d_32_there_is_never_enough_where_keys_are_few",
    ),
    (MERGE, "m_new + tl.log(l_i)", "m_i + tl.log(l_i)", STATE),
    (MERGE, "known = m_i != NEG_INF", "known = m_i == m_i", STATE),
    (MERGE, "begin, end = 0, N", "begin, end = first, N", "tests/heart/test_distributed.py::test_as_on_one_device"),
    (LAUNCH, '{dtype}, {mask}"', '{dtype}"', NAME),
    (LAUNCH, 'return f"{chip}, {kernel}', 'return f"{kernel}', NAME),
    (LAUNCH, "d {padded(Q.shape[-1])}, {dtype}", "d, {dtype}", NAME),
    (
        LAUNCH,
        "json.dumps(read(file) | new",
        "json.dumps(new | read(file)",
        "tests/heart/test_kernels.py::test_a_later_find_takes_the_place_of_an_earlier_one",
    ),
    (
        LAUNCH,
        "    forget()\n    return file",
        "    return file",
        "tests/heart/test_kernels.py::test_finds_come_first_and_stay",
    ),
    (
        LAUNCH,
        "aligned = math.gcd(16, *at) == 16",
        "aligned = True",
        "tests/heart/test_kernels.py::test_a_launch_serves_again_only_where_triton_would_not_compile_anew",
    ),
    (
        LAUNCH,
        "target.arch // 10 == 9",
        "target.arch // 10 >= 9",
        "tests/heart/test_kernels.py::test_each_chip_has_its_family",
    ),
    (SOFTMAX, "return max(scale * LOG2E.value, SMALLEST)", "return scale * LOG2E.value", SCALES),
    (
        LAUNCH,
        "megabytes * MiB // (2 * max",
        "megabytes * MiB // (max",
        "tests/heart/test_kernels.py::test_heads_at_once_stream_no_more_than_is_given",
    ),
    (CHOICE, "device) != (9, 0):", "device) < (9, 0):", HOPPER),
    (CHOICE, 'device.type != "cuda" or', 'device.type == "cpu" and', HOPPER),
    (CHOICE, 'key = "backward", options, same_bits,', 'key = "backward", options,', CALLS),
    (CHOICE, "any(map(has_gaps, (Q, K, V,", "any(map(has_gaps, (Q, K,", GAPS),
    (
        CHOICE,
        "any(map(has_gaps, (dO,",
        "any(map(has_gaps, (",
        "tests/heart/test_attention.py::test_expanded_inputs_and_gradients",
    ),
    (CHOICE, "dL is None or dL.is_contiguous()", "True", REPEATED),
    (CHOICE, "(dO, Q, K, V, O, dL, key_lengths", "(dO, Q, K, V, O, key_lengths", CALLS),
    (CHOICE, '"forward", options, *map', '"forward", *map', CALLS),
    (CHOICE, "kind_of, (Q, K, V, key_lengths, sinks", "kind_of, (Q, K, V, sinks", CALLS),
    (PREPARED, "(x.dtype, x.device, x.shape, x.stride())", "(x.dtype, x.shape, x.stride())", KIND),
    (PREPARED, "(x.dtype, x.device, x.shape, x.stride())", "(x.dtype, x.device, x.shape)", KIND),
    (PREPARED, "(x.dtype, x.device, x.shape, x.stride())", "(x.device, x.shape, x.stride())", KIND),
    (PREPARED, SAME, "found[1][1:] != (x._version, x.data_ptr())", FEWER),
    (PREPARED, SAME, "found[1][::2] != (limits, x.data_ptr())", CHANGED),
    (PREPARED, "(found[2]() is beside and found[3]", "(True or found[3]", TABLE),
    (RELAUNCH, "        base[3] = stream\n", "", AGAIN),
    (RELAUNCH, "            if hook.calls:", "            if not hook.calls:", AGAIN),
    (RELAUNCH, "own += addresses[len(self.encode) :]", "own += addresses", AGAIN),
    (
        RELAUNCH,
        "if scratch or not",
        "if not",
        "tests/heart/test_relaunch.py::test_a_kernel_with_scratch_memory_is_left_to_triton",
    ),
    (TILE, "return within // width, section", "return within // heads_at_once, section", PLACES),
    (
        TILE,
        "width = tl.minimum(heads_at_once, heads - section * heads_at_once)",
        "width = heads_at_once",
        PLACES,
    ),
    (TILE, "section * heads_at_once + within % width", "within % width", PLACES),
    (TILE, "tl.cast(batch, tl.int64) * strides[0]", "batch * strides[0]", FAR),
    (TILE, "tl.cast(head, tl.int64) * strides[1]", "head * strides[1]", FAR),
]
