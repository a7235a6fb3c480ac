"""Faults of the public calls: what they are told, and what they look at again."""

ATTENTION, CHECKS, OPERATORS, PAGED = (
    f"fa2_lab/{name}.py" for name in ("api/attention", "api/checks", "api/operators", "api/paged")
)
L_DTYPE = "q.new_empty(rows, dtype=torch.float32)"
TABLE = "tests/heart/test_decode_paged.py::test_the_table_is_looked_at_again_after_a_change"
AGAIN = "tests/heart/test_attention_call.py::test_lengths_that_were_right_for_many_keys_are_looked_at_again_for_fewer"

FAULTS = [
    (CHECKS, "was_seen(key_lengths, (N_k,)):", "was_seen(key_lengths, (max(N_k, 12),)):", AGAIN),
    (
        OPERATORS,
        L_DTYPE,
        L_DTYPE.replace(", dtype=torch.float32", ""),
        "tests/heart/test_attention_place.py::test_who_only_asks_for_shapes_is_told_dtypes_too",
    ),
    (
        OPERATORS,
        "seed = int(torch.randint(2**63 - 1, ()))",
        "seed = 0",
        "tests/heart/test_attention.py::test_fresh_seeds_come_from_torchs_generator",
    ),
    (
        ATTENTION,
        "seed - 2**64 if seed >= 2**63 else seed",
        "seed % 2**63",
        "tests/heart/test_attention.py::test_dropout_drops_what_the_reference_drops",
    ),
    (
        CHECKS,
        "if low < 0 or high > N_k:",
        "if high > N_k:",
        "tests/heart/test_attention_call.py::test_bad_input_is_named_before_any_launch",
    ),
    (
        OPERATORS,
        "-dL[..., None].double()",
        "dL[..., None].double()",
        "tests/heart/test_attention_call.py::test_the_reference_behind_the_same_call",
    ),
    (
        CHECKS,
        "LARGEST_SCALE = 1e38",
        "LARGEST_SCALE = 1e37",
        "tests/heart/test_attention_call.py::test_the_largest_scales_are_right",
    ),
    (CHECKS, "device=block_table.device) * size", "device=block_table.device) * 16", TABLE),
    (CHECKS, "if low < 0 or high >= count:", "if low < 0 or high > count:", TABLE),
    (
        OPERATORS,
        "forward_ad._current_level >= 0:",
        "False:",
        "tests/heart/test_attention_call.py::test_a_tangent_is_refused_and_not_lost",
    ),
    (
        PAGED,
        "masks = dict(causal=causal,",
        "masks = dict(causal=True,",
        "tests/heart/test_decode_paged.py::test_without_a_mask_every_query_sees_all_keys",
    ),
    (
        PAGED,
        "q.shape[:3], dtype=torch.float32)\n\n\n#",
        "q.shape[:3])\n\n\n#",
        "tests/heart/test_decode_paged.py::test_as_an_operator",
    ),
]
